"""The Cerebras PyTorch API on a Waferbox cluster: `import cerebras.pytorch as cstorch`, or `import cstorch`."""

import cstorch._internal.torch_release  # noqa: F401 - first, since it names what a release of torch lacks

# isort: split

from cstorch import (
    amp,
    backends,
    cirh,
    core,
    decomp,
    distributed,
    errors,
    experimental,
    lib,
    metrics,
    nn,
    optim,
    profiler,
    saver,
    sparse,
    storage,
    utils,
)
from cstorch._internal.absent import explain_in_modules
from cstorch._internal.execution import current_executor
from cstorch._internal.generations import accept_tree_spec_fields, warn_of_other_providers
from cstorch._internal.numpy_arrays import from_numpy, to_numpy
from cstorch.backend import backend, close_backend, current_backend, current_torch_device, device, use_cs
from cstorch.core.annotation import current_pol, device_annotation, pol
from cstorch.core.closures import checkpoint_closure, step_closure, summarize_scalar, summarize_tensor
from cstorch.core.compile import compile, trace
from cstorch.core.name_scope import add_debug_name, get_debug_name, name_scope, set_debug_scope
from cstorch.core.random import get_rng_state, set_rng_state
from cstorch.core.tensors import full, full_like, make_constant, ones, ones_like, tensor, zeros, zeros_like
from cstorch.decomp.registry import register_decomposition
from cstorch.storage import load, save
from waferbox import __version__ as _waferbox_version
from waferbox import settings as _settings

# The newest release whose API this is, which the Zoo writes to checkpoints and compares with theirs. A release takes a
# checkpoint of any other with a local part.
__version__ = f"2.10.0+waferbox.{_waferbox_version}"

__all__ = [
    "__version__",
    "add_debug_name",
    "amp",
    "backend",
    "backends",
    "checkpoint_closure",
    "cirh",
    "close_backend",
    "compile",
    "core",
    "current_backend",
    "current_executor",
    "current_pol",
    "current_torch_device",
    "decomp",
    "device",
    "device_annotation",
    "distributed",
    "errors",
    "experimental",
    "from_numpy",
    "full",
    "full_like",
    "get_debug_name",
    "get_rng_state",
    "lib",
    "load",
    "make_constant",
    "metrics",
    "name_scope",
    "nn",
    "ones",
    "ones_like",
    "optim",
    "pol",
    "profiler",
    "register_decomposition",
    "save",
    "saver",
    "set_debug_scope",
    "set_rng_state",
    "sparse",
    "step_closure",
    "storage",
    "summarize_scalar",
    "summarize_tensor",
    "tensor",
    "to_numpy",
    "trace",
    "use_cs",
    "utils",
    "zeros",
    "zeros_like",
]

_generating_docs = False  # public scripts read it

accept_tree_spec_fields()
warn_of_other_providers()
explain_in_modules()
if _settings.CHECK.is_set():  # else their imports would cost every script 0.2 s
    from cstorch._internal.checked_backend.backends import install_check

    install_check()

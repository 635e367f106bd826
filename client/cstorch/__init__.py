"""The Cerebras PyTorch API on a Waferbox cluster: `import cerebras.pytorch as cstorch`, or `import cstorch`."""

from cstorch import amp, backends, distributed, errors, metrics, nn, optim, sparse, storage, utils
from cstorch.absent import explain_in_modules
from cstorch.backend import backend, close_backend, current_backend, current_torch_device, device, use_cs
from cstorch.closures import checkpoint_closure, step_closure
from cstorch.compile import compile
from cstorch.execution import current_executor
from cstorch.generations import tell_of_other_providers
from cstorch.random import get_rng_state, set_rng_state
from cstorch.storage import load, save
from cstorch.tensors import full, full_like, ones, ones_like, tensor, zeros, zeros_like
from cstorch.trace import trace
from interconnect.version import __version__

__all__ = [
    "__version__",
    "amp",
    "backend",
    "backends",
    "checkpoint_closure",
    "close_backend",
    "compile",
    "current_backend",
    "current_executor",
    "current_torch_device",
    "device",
    "distributed",
    "errors",
    "full",
    "full_like",
    "get_rng_state",
    "load",
    "metrics",
    "nn",
    "ones",
    "ones_like",
    "optim",
    "save",
    "set_rng_state",
    "sparse",
    "step_closure",
    "storage",
    "tensor",
    "trace",
    "use_cs",
    "utils",
    "zeros",
    "zeros_like",
]

tell_of_other_providers()
explain_in_modules()

"""What the real API has and Waferbox has not, and what to do instead. docs/compatibility.md shows the same."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from cstorch.errors import AbsentError

_NO_GRAPH = "it only names or annotates operations of the graph; leave it out, no number changes"
_DECORATE = "decorate functions with cstorch.step_closure and cstorch.checkpoint_closure"
_LISTENERS = "a step is traced whole and nothing can listen in; return tensors from the traced function instead"
_MESH = "tensors are placed by the compiler; leave placements out, and set num_csx in the ClusterConfig"
_INSIDE = "it belongs to the real client's inside; there are only CSConfig, log, errors and utils.classes, for scripts"
_ONE_RELEASE = "scripts of that release called it for effects inside the old runtime; leave it out"

# By name; a module stands for all that is missing in it.
_REASONS: Mapping[str, str] = {
    "cstorch.amp": "the compiler inserts casts, by operation and not by function: set "
    "cstorch.backends.csx.precision.optimization_level, or cast tensors to a half yourself, which is left as it is",
    "cstorch.amp.setup_optimizer": "a GradScaler needs no preparation of the optimizer; leave it out",
    "cstorch.backends": "Waferbox has nothing that the flag would change; leave it out",
    "cstorch.checks": "its checks are always on; leave it out",
    "cstorch.closures": _DECORATE,
    "cstorch.configure": "it is of release 1.8: import cerebras_pytorch.experimental, or make a cstorch.backend",
    "cstorch.core": _NO_GRAPH,
    "cstorch.decomp": "register with cstorch.register_decomposition",
    "cstorch.distributed": "ask get_streaming_rank, num_streamers and their relatives in the input_fn",
    "cstorch.experimental": "it is experimental in the real system too; " + _LISTENERS,
    "cstorch.mesh": _MESH,
    "cstorch.metrics": "it is not written yet; subclass cstorch.metrics.Metric",
    "cstorch.nn": "use torch.nn and torch.nn.functional, which are traced as they are",
    "cstorch.nn.SelectiveGrad": "multiply gradients by masks between backward and optimizer.step",
    "cstorch.nn.StripPadding": "mask the padding with torch.where",
    "cstorch.optim": "it is not written yet; subclass cstorch.optim.Optimizer, or LRScheduler in optim.lr_scheduler",
    "cstorch.profiler": "use executor.profiler for rates, and the compile report for where the time goes",
    "cstorch.saver": "use cstorch.save and cstorch.load",
    "cstorch.sparse": "give what cstorch.sparse.configure returns to model.apply and then to optimizer.apply",
    "cstorch.storage": "use cstorch.save and cstorch.load",
    "cstorch.summarize_scalar": "it is of releases 1.9 to 2.1: import cerebras_pytorch, or write in a step closure",
    "cstorch.summarize_tensor": "it is of releases 1.9 to 2.1: import cerebras_pytorch, or write in a step closure",
    "cstorch.utils": "it is not written yet; use torch's or Python's own means",
    "cstorch.utils.CSConfig": "it is of releases 1.9 to 2.1: give the backend a cstorch.distributed.ClusterConfig",
    "cstorch.utils.step_closures": _DECORATE,
    "cstorch.utils.data": "use torch.from_numpy and tensor.numpy(); for bfloat16 tensor.float().numpy()",
    "cstorch.utils.nest": "visit functions stay in the process that registers them: register them where they are used",
    "cerebras_appliance": _INSIDE,
    "cerebras_torch.core": _ONE_RELEASE,
}


def reason(name: str) -> str | None:
    """Why `cstorch.x.y` is absent, as a sentence for the user; None for a name that is not known to be."""
    known = name
    while known not in _REASONS:
        known, dot, _ = known.rpartition(".")
        if not dot:
            return None
    return f"{name} is not part of Waferbox: {_REASONS[known]}."


def error(module: str, attribute: str) -> AttributeError:
    """The error for an attribute that a module, or an object that stands for one, does not have."""
    text = reason(f"{module}.{attribute}")
    if text is None or attribute.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {attribute!r}")
    return AbsentError(text)


def getter(module: str) -> Callable[[str], Any]:
    """What a module is to call `__getattr__`, to say why a name is absent."""

    def get(attribute: str) -> Any:
        raise error(module, attribute)

    return get


def explain_in_modules() -> None:
    """Has the loaded modules of cstorch and cerebras_appliance in which names are absent say why."""
    modules = [name.rpartition(".")[0] for name in _REASONS] + list(_REASONS)
    for name, module in list(sys.modules.items()):
        is_explained = name in modules or any(name.startswith(f"{known}.") for known in _REASONS)
        if is_explained and name.partition(".")[0] in ("cstorch", "cerebras_appliance"):
            vars(module).setdefault("__getattr__", getter(name))
            # `from module import name` hides what __getattr__ raises; of a package it then asks the finder, which says
            # the same (generations.py). So every module is a package, if without files.
            vars(module).setdefault("__path__", [])

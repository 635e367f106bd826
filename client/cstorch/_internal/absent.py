"""Names of the real API that Waferbox lacks, and what to do instead. docs/compatibility.md shows the same."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from cstorch.errors import AbsentError

_DECORATE = "decorate functions with cstorch.step_closure and cstorch.checkpoint_closure"
_PROFILE = "use executor.profiler for rates, and the compile report for where the time goes"
_INSIDE = (
    "it belongs to the real client's inside; scripts find CSConfig, environment, errors, log, storage and utils here"
)

# By name; a module stands for all names that it lacks.
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "cstorch.amp.disable_casts",
            "cstorch.amp.float_function",
            "cstorch.amp.half_function",
            "cstorch.amp.init",
            "cstorch.amp.promote_function",
            "cstorch.amp.register_float_function",
            "cstorch.amp.register_half_function",
            "cstorch.amp.register_promote_function",
        ),
        "the compiler inserts casts, by operation and not by function: set "
        "cstorch.backends.csx.precision.optimization_level, or cast tensors to a half yourself, which is left as it is",
    ),
    "cstorch.amp.setup_optimizer": "a GradScaler needs no preparation of the optimizer; leave it out",
    "cstorch.backend": "it belongs to the real client's inside; use what cstorch.backend(...) returns",
    "cstorch.backends": "Waferbox has nothing that the flag would change; leave it out",
    "cstorch.checks": "its checks are always on; leave it out",
    "cstorch.configure": "it is of release 1.8: import cerebras_pytorch.experimental, or make a cstorch.backend",
    "cstorch.core": "it belongs to the real client's inside, and no number depends on it; leave it out",
    "cstorch.core.closures": _DECORATE,
    "cstorch.decomp": "register with cstorch.register_decomposition",
    **dict.fromkeys(
        (
            "cstorch.experimental.listener.register_function_mode_forward_hook",
            "cstorch.experimental.listener.register_function_mode_forward_pre_hook",
            "cstorch.experimental.listener.register_trace_fn_post_hook",
            "cstorch.experimental.listener.register_trace_fn_pre_hook",
        ),
        "hooks are for what modules return (register_traced_tensor_hook), and not for single operations",
    ),
    "cstorch.mesh": "tensors are placed by the compiler; leave placements out, and set num_csx in the ClusterConfig",
    "cstorch.profiler.ProfilerRegistry": _PROFILE,
    "cstorch.profiler.tensorboard_trace_handler": _PROFILE,
    "cstorch.saver": "use cstorch.save and cstorch.load",
    "cstorch.storage": "use cstorch.save and cstorch.load",
    "cstorch.utils.make_constant": "use cstorch.make_constant",
    **dict.fromkeys(
        (
            "cstorch.utils.data.from_numpy",
            "cstorch.utils.data.is_bf16",
            "cstorch.utils.data.to_numpy",
            "cstorch.utils.data.utils.from_numpy",
            "cstorch.utils.data.utils.is_bf16",
            "cstorch.utils.data.utils.to_numpy",
        ),
        "use torch.from_numpy and tensor.numpy(), for bfloat16 tensor.float().numpy()",
    ),
    **dict.fromkeys(
        ("cstorch.utils.nest.deserialize_visit_fns", "cstorch.utils.nest.serialize_visit_fns"),
        "visit functions stay in the process that registers them: register them where they are used",
    ),
    "cstorch.utils.step_closures": _DECORATE,
    "cstorch.utils.utils.signature_matches_type_hint": "use inspect.signature(function).bind(...)",
    "cerebras_appliance": _INSIDE,
}


def reason(name: str) -> str | None:
    """Returns the reason for the absence of `cstorch.x.y`, as a sentence for the user; None for other names."""
    known = name
    while known not in _REASONS:
        known, dot, _ = known.rpartition(".")
        if not dot:
            return None
    return f"{name} is not part of Waferbox: {_REASONS[known]}."


def error(module: str, attribute: str) -> AttributeError:
    """Returns the error for an attribute that a module, or an object in place of one, does not have."""
    text = reason(f"{module}.{attribute}")
    if text is None or attribute.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {attribute!r}")
    return AbsentError(text)


def getter(module: str) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`, whose error has the reason for the absence of a name."""

    def get(attribute: str) -> Any:
        raise error(module, attribute)

    return get


def explain_in_modules() -> None:
    """Gives such a `__getattr__` to the loaded modules of cstorch and cerebras_appliance that lack names."""
    modules = [name.rpartition(".")[0] for name in _REASONS] + list(_REASONS)
    for name, module in list(sys.modules.items()):
        is_explained = name in modules or any(name.startswith(f"{known}.") for known in _REASONS)
        if is_explained and name.partition(".")[0] in ("cstorch", "cerebras_appliance"):
            vars(module).setdefault("__getattr__", getter(name))
            # `from module import name` hides the error of __getattr__. For a package it calls the finder next, which
            # raises the same error (generations.py). So every such module is a package, without files.
            vars(module).setdefault("__path__", [])

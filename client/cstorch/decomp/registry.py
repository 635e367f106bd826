"""Decompositions: functions of the script that say how a traced step computes an operation of torch."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from cstorch._internal.tracing.rewrites import decompositions
from cstorch.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])


def register_decomposition(
    op: OpOverload | OpOverloadPacket, device: Literal["CSX", "CPU"] = "CSX"
) -> Callable[[Function], Function]:
    """Returns a decorator: its function is called in place of an operation of torch while a step is traced.

    The results must have the shapes and types of the operation's. Gradients are torch's own for the operation. What the
    function calls is recorded; if it calls the operation, that is recorded as it is.

    Args:
        op: The operation, such as `torch.ops.aten.gelu.default`; `torch.ops.aten.gelu` for all its overloads.
        device: "CSX"; on the CPU operations are torch's own.

    Raises:
        ConfigurationError: The device is another one, or the operation never reaches a traced step, because torch
            itself computes it by others.

    Example:
        ::

            @cstorch.register_decomposition(torch.ops.aten.silu.default)
            def silu(x):
                return x * torch.sigmoid(x)

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if device != "CSX":
        raise ConfigurationError(f'decompositions are for traced steps, device="CSX", not {device!r}')
    overloads = _overloads(op)

    def decorate(function: Function) -> Function:
        for overload in overloads:
            name = str(overload._schema).partition("(")[0]
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
                raise ConfigurationError(
                    f"{name} never reaches a traced step: torch computes it by other operations. Register "
                    "decompositions for those"
                )
            decompositions.TABLE[overload] = function
        return function

    return decorate


def remove_decomposition(op: OpOverload | OpOverloadPacket) -> None:
    """Removes the decomposition of an operation, if it has one.

    Args:
        op: The operation, or all its overloads.
    """
    for overload in _overloads(op):
        decompositions.TABLE.pop(overload, None)


def _overloads(op: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]

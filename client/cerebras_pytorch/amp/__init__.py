"""cstorch.amp, with release 2.0's call for bfloat16 and its tolerance for overflows."""

from importlib import import_module
from typing import Any, Literal

from cstorch._internal.generations import inherit
from cstorch.amp import GradScaler as _GradScaler
from cstorch.amp import enable_mixed_precision, set_half_dtype

__all__ = ["GradScaler", "use_bfloat16"]

_OLDER = frozenset({"_amp_state", "get_init_params", "load_state_dict", "state_dict"})

_inherited = inherit("cerebras_pytorch.amp", "cstorch.amp")


def __getattr__(name: str) -> Any:
    # cerebras_torch hooks into every optimizer, so it is imported only when one of its names is used.
    return getattr(import_module("cerebras_torch.amp"), name) if name in _OLDER else _inherited(name)


def use_bfloat16(value: bool = True) -> None:
    """Makes bfloat16 the half type, or float16.

    Args:
        value: True for bfloat16.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.amp`.
    """
    set_half_dtype("bfloat16" if value else "float16")


class GradScaler(_GradScaler):
    """cstorch.amp.GradScaler, whose dynamic scale by default tolerates overflows in one step of twenty.

    Args:
        loss_scale: "dynamic", or the static scale; None and 0 are 1.
        init_scale: The first dynamic scale; None: 2^15 for float16, 2^31 for cbfloat16, 1 for bfloat16.
        steps_per_increase: The number of steps without overflow after which the scale is doubled; None: 2000.
        min_loss_scale: The least dynamic scale; None: 2^-14.
        max_loss_scale: The greatest dynamic scale; None: `init_scale`, or its default if that is greater.
        overflow_tolerance: The fraction of steps with overflow, from 0 to less than 1, that does not yet halve the
            scale.
        max_gradient_norm: The greatest norm over all gradients, to which `step` clips them; None: no clipping.
        mixed_precision: Enables or disables mixed precision, as before release 2.0; None: it stays as it is.

    Raises:
        ConfigurationError: A setting is out of range.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.amp`.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"] | None = None,
        init_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.05,
        max_gradient_norm: float | None = None,
        mixed_precision: bool | None = None,
    ) -> None:
        if mixed_precision is not None:
            enable_mixed_precision(mixed_precision)
        super().__init__(
            loss_scale,
            init_scale,
            steps_per_increase,
            min_loss_scale,
            max_loss_scale,
            overflow_tolerance,
            max_gradient_norm,
        )

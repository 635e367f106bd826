"""cstorch.amp, with release 2.0's way to ask for bfloat16, and its tolerance for overflows."""

from importlib import import_module
from typing import Any, Literal

from cstorch._internal.generations import inherit
from cstorch.amp import GradScaler as _GradScaler
from cstorch.amp import enable_mixed_precision, set_half_dtype

__all__ = ["GradScaler", "use_bfloat16"]

_OLDER = frozenset({"_amp_state", "get_init_params", "load_state_dict", "state_dict"})

_inherited = inherit("cerebras_pytorch.amp", "cstorch.amp")


def __getattr__(name: str) -> Any:
    # cerebras_torch hooks into every optimizer, so it is imported only where it is asked for.
    return getattr(import_module("cerebras_torch.amp"), name) if name in _OLDER else _inherited(name)


def use_bfloat16(value: bool = True) -> None:
    """Makes bfloat16 the half type, or float16 again."""
    set_half_dtype("bfloat16" if value else "float16")


class GradScaler(_GradScaler):
    """As cstorch.amp.GradScaler; a dynamic scale by default tolerates overflows in one step of twenty.

    mixed_precision: of releases before 2.0; enables mixed precision, or disables it; by default it stays as it is.
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

"""cstorch.amp, with release 2.0's way to ask for bfloat16, and its tolerance for overflows."""

from typing import Literal

from cstorch.amp import GradScaler as _GradScaler
from cstorch.amp import set_half_dtype
from cstorch.generations import inherit

__all__ = ["GradScaler", "use_bfloat16"]

__getattr__ = inherit("cerebras_pytorch.amp", "cstorch.amp")


def use_bfloat16(value: bool = True) -> None:
    """Makes bfloat16 the half type, or float16 again."""
    set_half_dtype("bfloat16" if value else "float16")


class GradScaler(_GradScaler):
    """As cstorch.amp.GradScaler; a dynamic scale by default tolerates overflows in one step of twenty."""

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"] | None = None,
        init_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.05,
        max_gradient_norm: float | None = None,
    ) -> None:
        super().__init__(
            loss_scale,
            init_scale,
            steps_per_increase,
            min_loss_scale,
            max_loss_scale,
            overflow_tolerance,
            max_gradient_norm,
        )

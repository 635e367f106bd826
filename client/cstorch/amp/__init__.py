"""Mixed precision: weights and updates in float32, what the wafers compute in half where that is sound."""

from cstorch.amp.mixed_precision import (
    enable_mixed_precision,
    get_half_dtype,
    get_half_dtype_str,
    mixed_precision,
    set_half_dtype,
)
from cstorch.amp.steps import optimizer_step

__all__ = [
    "enable_mixed_precision",
    "get_half_dtype",
    "get_half_dtype_str",
    "mixed_precision",
    "optimizer_step",
    "set_half_dtype",
]

"""Mixed precision: weights and updates in float32, what the wafers compute in half where that is sound."""

from cstorch.amp.autocast import autocast
from cstorch.amp.grad_scaler import GradScaler, optimizer_step
from cstorch.amp.updates import isfinite, update_if_finite
from cstorch.backends.mixed_precision import (
    enable_mixed_precision,
    get_floating_point_dtype,
    get_floating_point_dtype_str,
    get_half_dtype,
    get_half_dtype_str,
    is_cbfloat16_tensor,
    mixed_precision,
    set_half_dtype,
)

__all__ = [
    "GradScaler",
    "autocast",
    "enable_mixed_precision",
    "get_floating_point_dtype",
    "get_floating_point_dtype_str",
    "get_half_dtype",
    "get_half_dtype_str",
    "is_cbfloat16_tensor",
    "isfinite",
    "mixed_precision",
    "optimizer_step",
    "set_half_dtype",
    "update_if_finite",
]

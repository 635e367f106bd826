"""cstorch.amp, with the GradScaler and use_bfloat16 of 2.0."""

from cerebras_pytorch.amp import GradScaler, use_bfloat16
from cstorch._internal.generations import inherit

__all__ = ["GradScaler", "use_bfloat16"]

__getattr__ = inherit("cerebras_pytorch.experimental.amp", "cstorch.amp")

"""cstorch.amp, with the GradScaler of 2.0."""

from cerebras_pytorch.amp import GradScaler
from cstorch.generations import inherit

__all__ = ["GradScaler"]

__getattr__ = inherit("cerebras_pytorch.experimental.amp", "cstorch.amp")

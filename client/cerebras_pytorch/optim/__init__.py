"""cstorch.optim, with the schedules of releases 1.6 to 1.9."""

from cerebras_pytorch.optim import lr_scheduler
from cstorch._internal.generations import inherit

__all__ = ["lr_scheduler"]

__getattr__ = inherit("cerebras_pytorch.optim", "cstorch.optim")

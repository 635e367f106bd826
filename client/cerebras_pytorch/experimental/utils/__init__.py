"""cstorch.utils, and the DataLoader that is iterated itself."""

from cerebras_pytorch.experimental.utils import data
from cstorch._internal.generations import inherit

__all__ = ["data"]

__getattr__ = inherit("cerebras_pytorch.experimental.utils", "cstorch.utils")

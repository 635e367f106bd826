"""cstorch.utils, and the DataLoader that is iterated itself."""

from cerebras_pytorch.experimental.utils import data
from cstorch.generations import inherit

__all__ = ["data"]

__getattr__ = inherit("cerebras_pytorch.experimental.utils", "cstorch.utils")

"""cstorch.utils.data, with a DataLoader that is iterated itself (1.8) and the executor of 2.0 (1.9)."""

from cerebras_pytorch.experimental.utils.data.dataloader import DataLoader
from cerebras_pytorch.utils.data import DataExecutor
from cstorch._internal.generations import inherit

__all__ = ["DataExecutor", "DataLoader"]

__getattr__ = inherit("cerebras_pytorch.experimental.utils.data", "cstorch.utils.data")

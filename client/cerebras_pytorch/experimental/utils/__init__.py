"""cstorch.utils, CSConfig, and the DataLoader that is iterated itself."""

from cerebras_appliance.CSConfig import CSConfig
from cerebras_pytorch.experimental.utils import data
from cstorch.generations import inherit

__all__ = ["CSConfig", "data"]

__getattr__ = inherit("cerebras_pytorch.experimental.utils", "cstorch.utils")

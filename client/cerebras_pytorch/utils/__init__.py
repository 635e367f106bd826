"""cstorch.utils, and CSConfig."""

from cerebras_appliance.CSConfig import CSConfig
from cerebras_pytorch.utils import data
from cstorch.generations import inherit

__all__ = ["CSConfig", "data"]

__getattr__ = inherit("cerebras_pytorch.utils", "cstorch.utils")

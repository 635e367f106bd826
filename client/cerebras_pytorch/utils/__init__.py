"""cstorch.utils, with an executor that is told the cluster."""

from cerebras_pytorch.utils import data, utils
from cstorch._internal.generations import inherit

__all__ = ["data", "utils"]

__getattr__ = inherit("cerebras_pytorch.utils", "cstorch.utils")

"""cstorch.utils, with an executor that has the cluster's configuration."""

from cerebras_pytorch.utils import data, utils
from cstorch._internal.generations import inherit

__all__ = ["data", "utils"]

__getattr__ = inherit("cerebras_pytorch.utils", "cstorch.utils")

"""cstorch.utils.data, with an executor that has the cluster's configuration."""

from cerebras_pytorch.utils.data.data_executor import DataExecutor
from cstorch._internal.generations import inherit

__all__ = ["DataExecutor"]

__getattr__ = inherit("cerebras_pytorch.utils.data", "cstorch.utils.data")

"""Where the real system keeps the DataExecutor, and the type of a micro batch's size."""

from cstorch.backends.csx_flags import MicroBatchSize as MbsSetting
from cstorch.utils.data.executor import DataExecutor

__all__ = ["DataExecutor", "MbsSetting"]

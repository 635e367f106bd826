"""Input: the DataLoader, the executor that loops over its batches, and schedules of steps."""

from cstorch.batch import infer_batch_size
from cstorch.utils.data.dataloader import DataLoader
from cstorch.utils.data.executor import DataExecutor
from cstorch.utils.data.schedule import Schedule

__all__ = ["DataExecutor", "DataLoader", "Schedule", "infer_batch_size"]

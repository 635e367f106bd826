"""Input: the DataLoader, the executor that loops over its batches, samplers, and schedules of steps."""

from cstorch._internal.batch import infer_batch_size
from cstorch._internal.numpy_arrays import from_numpy, to_numpy
from cstorch.utils.data import sampler
from cstorch.utils.data.data_executor import DataExecutor
from cstorch.utils.data.dataloader import DataLoader, RestartableDataLoader
from cstorch.utils.data.sampler import DistributedSampler
from cstorch.utils.data.schedule import Schedule, compute_num_steps
from cstorch.utils.data.synthetic import SyntheticDataset
from cstorch.utils.nest import visit_torch_tensors

__all__ = [
    "DataExecutor",
    "DataLoader",
    "DistributedSampler",
    "RestartableDataLoader",
    "Schedule",
    "SyntheticDataset",
    "compute_num_steps",
    "from_numpy",
    "infer_batch_size",
    "sampler",
    "to_numpy",
    "visit_torch_tensors",
]

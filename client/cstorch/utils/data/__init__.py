"""Input: the DataLoader, the executor that loops over its batches, samplers, and schedules of steps."""

from cstorch.batch import infer_batch_size
from cstorch.numpy_arrays import from_numpy, to_numpy
from cstorch.utils.data import sampler
from cstorch.utils.data.dataloader import DataLoader
from cstorch.utils.data.executor import DataExecutor
from cstorch.utils.data.restartable import RestartableDataLoader
from cstorch.utils.data.sampler import DistributedSampler
from cstorch.utils.data.schedule import Schedule
from cstorch.utils.data.steps import compute_num_steps
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

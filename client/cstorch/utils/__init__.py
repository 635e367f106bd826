"""Data, nests, progress and rates."""

from cstorch.utils import benchmark, data, nest, profiler, progress, tracker, utils
from cstorch.utils.data import DataExecutor, DataLoader, RestartableDataLoader, SyntheticDataset

__all__ = [
    "DataExecutor",
    "DataLoader",
    "RestartableDataLoader",
    "SyntheticDataset",
    "benchmark",
    "data",
    "nest",
    "profiler",
    "progress",
    "tracker",
    "utils",
]

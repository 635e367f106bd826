"""Data, nests, progress, rates, and summaries."""

from importlib import import_module
from typing import Any

from cstorch import absent
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
    "tensorboard",
    "tracker",
    "utils",
]

_absent = absent.getter("cstorch.utils")


def __getattr__(name: str) -> Any:
    # Importing tensorboard takes as long as a small compile, and many scripts have no use for it.
    return import_module("cstorch.utils.tensorboard") if name == "tensorboard" else _absent(name)

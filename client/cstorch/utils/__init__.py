"""Data, nests, progress, rates, and summaries."""

from importlib import import_module
from typing import Any

from cstorch._internal import absent
from cstorch.distributed.cs_config import CSConfig
from cstorch.utils import benchmark, call_once, data, kernel, nest, num_kv_groups, profiler, progress, tracker, utils
from cstorch.utils.data import DataExecutor, DataLoader, RestartableDataLoader, SyntheticDataset
from cstorch.utils.utils import extract_loss

__all__ = [
    "CSConfig",
    "DataExecutor",
    "DataLoader",
    "RestartableDataLoader",
    "SyntheticDataset",
    "benchmark",
    "call_once",
    "data",
    "extract_loss",
    "kernel",
    "nest",
    "num_kv_groups",
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

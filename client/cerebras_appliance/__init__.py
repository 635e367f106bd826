"""Names of public scripts: CSConfig, errors, loggers named after classes, storage, and helpers."""

import logging

from cerebras_appliance import environment, errors, log, run_utils, storage, utils
from cerebras_appliance.CSConfig import CSConfig
from cstorch._internal.absent import explain_in_modules
from cstorch.distributed import ClusterConfig

__all__ = [
    "DEFAULT_COMPILE_DIR",
    "CSConfig",
    "ClusterConfig",
    "environment",
    "errors",
    "log",
    "logger",
    "run_utils",
    "storage",
    "utils",
]

DEFAULT_COMPILE_DIR = "cached_compile"

logger = logging.getLogger("cstorch")

explain_in_modules()

"""The few helpers that scripts take from here: loggers named after classes, CSConfig, errors."""

import logging

from cerebras_appliance import errors, log, utils
from cerebras_appliance.CSConfig import CSConfig
from cstorch.absent import explain_in_modules
from cstorch.distributed.cluster_config import ClusterConfig

__all__ = ["CSConfig", "ClusterConfig", "errors", "log", "logger", "utils"]

logger = logging.getLogger("cstorch")

explain_in_modules()

"""The few helpers that scripts take from here: loggers named after classes, CSConfig, errors."""

from cerebras_appliance import errors, log
from cerebras_appliance.CSConfig import CSConfig
from cstorch.cluster_config import ClusterConfig

__all__ = ["CSConfig", "ClusterConfig", "errors", "log"]

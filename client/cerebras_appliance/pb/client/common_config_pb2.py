"""DebugArgs, under the module name of release 1.6."""

from cerebras_appliance.pb.workflow.appliance.common.common_config_pb2 import DebugArgs, ExecutionStrategy

__all__ = ["DebugArgs", "ExecutionStrategy"]

"""DebugArgs and ExecutionStrategy."""

from enum import IntEnum

from cstorch.backends.open_settings import OpenSettings

__all__ = ["ES_PIPELINE", "ES_WEIGHT_STREAMING", "DebugArgs", "ExecutionStrategy"]


class ExecutionStrategy(IntEnum):
    """How a model runs on a wafer."""

    ES_PIPELINE = 1
    ES_WEIGHT_STREAMING = 2


ES_PIPELINE = ExecutionStrategy.ES_PIPELINE
ES_WEIGHT_STREAMING = ExecutionStrategy.ES_WEIGHT_STREAMING


class DebugArgs(OpenSettings):
    """Settings of the real system's compiler and management, by any name. Waferbox has nothing that they change."""

    class DebugINI(OpenSettings):
        """`DebugArgs(debug_ini=DebugArgs.DebugINI(frozen_content=text))`."""

    class DebugMGR(OpenSettings):
        """`debug_args.debug_mgr`."""

        class CleanPodPolicy(IntEnum):
            """The treatment of the processes of a job that has ended."""

            ALL = 0
            NONE = 1

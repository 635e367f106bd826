"""What a module is compiled for, and how a script wants a wafer's rows divided in time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from appliance.compiler.core.precision_table import DEFAULT_LEVEL, LEVELS
from wsc.v1 import plan_pb2

# --- How a script wants a wafer's rows to be divided in time ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Rows of a micro-batch. size 0: the compiler chooses: as many as fit a wafer, or, to explore, those that are
    predicted to be the fastest of the sizes from min_size to max_size (0: no bound)."""

    size: int = 0
    explore: bool = False
    min_size: int = 0
    max_size: int = 0

    @classmethod
    def from_proto(cls, message: plan_pb2.MicroBatching) -> "MicroBatching":
        return cls(size=message.size, explore=message.explore, min_size=message.min_size, max_size=message.max_size)


# --- What a module is compiled for ------------------------------------------------------------------------------------


DEFAULT_WAFER_MEMORY_BYTES: Final = 8 << 30


class Half(Enum):
    """Element types of half precision that wafers compute in; the values are the API's names of them."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    CBFLOAT16 = "cbfloat16"


# As plans name them.
HALF_TYPES: Final = {
    Half.FLOAT16: plan_pb2.HALF_TYPE_FLOAT16,
    Half.BFLOAT16: plan_pb2.HALF_TYPE_BFLOAT16,
    Half.CBFLOAT16: plan_pb2.HALF_TYPE_CBFLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision: what the wafers compute in, beside float32, and how much of it (`precision_table`)."""

    half: Half
    level: int = DEFAULT_LEVEL
    # Gradients of weights travel from the wafers in half, too.
    half_gradients: bool = False

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"a precision optimisation level is one of 0, 1 and 2, not {self.level}")

    @classmethod
    def from_proto(cls, message: plan_pb2.Precision) -> "Precision":
        """What a message says. ValueError for a type or a level that does not exist."""
        for half, code in HALF_TYPES.items():
            if code == message.half:
                return cls(half=half, level=message.optimization_level, half_gradients=message.half_gradients)
        raise ValueError(f"there is no half precision {message.half}")

    @classmethod
    def of_options(cls, half: str, level: int, half_gradients: bool) -> "Precision | None":
        """What a command line says; half empty: float32 throughout. ValueError where its options do not fit."""
        if not half and half_gradients:
            raise ValueError("without --half there is no half precision for gradients to travel in")
        if half and half not in [known.value for known in Half]:
            known = ", ".join(known.value for known in Half)
            raise ValueError(f"there is no half precision {half!r}; known are {known}")
        return cls(half=Half(half), level=level, half_gradients=half_gradients) if half else None


class KernelLibrary(Enum):
    """What runs the kernels of layers; the values are the API's names. See `WaferPlan.kernel_library`."""

    ATEN = "aten"
    INDUCTOR = "inductor"

    @property
    def code(self) -> "plan_pb2.KernelLibrary.ValueType":
        """As plans name it."""
        return plan_pb2.KernelLibrary.Value(f"KERNEL_LIBRARY_{self.name}")

    @classmethod
    def from_proto(cls, code: "plan_pb2.KernelLibrary.ValueType") -> "KernelLibrary":
        """What a message says. ValueError for a library that does not exist."""
        if code == plan_pb2.KERNEL_LIBRARY_UNSPECIFIED:
            return cls.ATEN
        for library in cls:
            if library.code == code:
                return library
        raise ValueError(f"there is no kernel library {code}")


class ExecutionStrategy(Enum):
    """How a step is run; the values are the API's names. See `PipelinePlan`."""

    WEIGHT_STREAMING = "weight_streaming"
    PIPELINE = "pipeline"

    @classmethod
    def from_proto(cls, code: "plan_pb2.ExecutionStrategy.ValueType") -> "ExecutionStrategy":
        """What a message says. ValueError for a strategy that does not exist."""
        if code == plan_pb2.EXECUTION_STRATEGY_UNSPECIFIED:
            return cls.WEIGHT_STREAMING
        for strategy in cls:
            if plan_pb2.ExecutionStrategy.Value(f"EXECUTION_STRATEGY_{strategy.name}") == code:
                return strategy
        raise ValueError(f"there is no execution strategy {code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The cluster, as far as a plan depends on it."""

    num_csx: int
    num_shards: int
    # States that lie on a MemoryX shard already, from an execution before.
    pinned_shards: Mapping[str, int] = field(default_factory=dict)
    wafer_memory_bytes: int = DEFAULT_WAFER_MEMORY_BYTES
    # Weights stay on a wafer between two uses if so many segments, or fewer, lie between them.
    prefetch_layers: int = 4
    # Into how many a wafer's rows of the batch are divided.
    micro_batches: int = 1
    # None: float32 throughout.
    precision: Precision | None = None
    kernel_library: KernelLibrary = KernelLibrary.ATEN
    execution_strategy: ExecutionStrategy = ExecutionStrategy.WEIGHT_STREAMING
    # Of the model, side by side on a pipelined wafer: each has its share of the batch, and divides that.
    num_replicas: int = 1
    # Of a pipelined wafer: for each micro-batch, while others are in flight.
    asynchronous_updates: bool = False
    # Of the host of a wafer: a pipelined wafer has no more regions than that.
    wafer_cores: int = 2

    def __post_init__(self) -> None:
        if self.num_csx < 1 or self.num_shards < 1:
            raise ValueError(f"a target has at least one wafer and one shard, not {self.num_csx} and {self.num_shards}")
        if self.micro_batches < 1:
            raise ValueError(f"a wafer has at least one micro-batch, not {self.micro_batches}")
        if self.num_replicas < 1:
            raise ValueError(f"there is at least one replica of a model, not {self.num_replicas}")
        if self.wafer_cores < 1:
            raise ValueError(f"a wafer's host has at least one core, not {self.wafer_cores}")

    @property
    def num_parts(self) -> int:
        """Into how many the batch is cut, over wafers and replicas, and over time."""
        return self.num_csx * self.num_replicas * self.micro_batches

"""The target of a compile: the cluster, the precision, and the division into micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from appliance.compiler.core.precision_table import DEFAULT_LEVEL, LEVELS
from wsc.v1 import plan_pb2

# --- Micro-batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """How a script wants a wafer's rows to be divided into micro-batches.

    Attributes:
        size: rows of a micro-batch; 0: the compiler chooses as many as fit a wafer.
        explore: whether the compiler chooses the size that is predicted to be the fastest instead.
        min_size: smallest size to explore; 0: no bound.
        max_size: largest size to explore; 0: no bound.
    """

    size: int = 0
    explore: bool = False
    min_size: int = 0
    max_size: int = 0

    @classmethod
    def from_proto(cls, message: plan_pb2.MicroBatching) -> "MicroBatching":
        return cls(size=message.size, explore=message.explore, min_size=message.min_size, max_size=message.max_size)


# --- Targets ----------------------------------------------------------------------------------------------------------

DEFAULT_WAFER_MEMORY_BYTES: Final = 8 << 30


class Half(Enum):
    """Half precision types in which wafers compute; the values are their names in the API."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    CBFLOAT16 = "cbfloat16"


# The types as plans name them.
HALF_TYPES: Final = {
    Half.FLOAT16: plan_pb2.HALF_TYPE_FLOAT16,
    Half.BFLOAT16: plan_pb2.HALF_TYPE_BFLOAT16,
    Half.CBFLOAT16: plan_pb2.HALF_TYPE_CBFLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision.

    Attributes:
        half: the half precision type in which wafers compute.
        level: how much is computed in it, 0 to 2: see `precision_table.py`.
        half_gradients: whether gradients of weights travel in half precision, too.
    """

    half: Half
    level: int = DEFAULT_LEVEL
    half_gradients: bool = False

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"a precision optimisation level is one of 0, 1 and 2, not {self.level}")

    @classmethod
    def from_proto(cls, message: plan_pb2.Precision) -> "Precision":
        """From a message. Raises ValueError for a type or a level that does not exist."""
        for half, code in HALF_TYPES.items():
            if code == message.half:
                return cls(half=half, level=message.optimization_level, half_gradients=message.half_gradients)
        raise ValueError(f"there is no half precision {message.half}")

    @classmethod
    def of_options(cls, half: str, level: int, half_gradients: bool) -> "Precision | None":
        """From the options of a command; None if `half` is empty: float32 throughout.

        Raises:
            ValueError: the type is unknown, or the options contradict one another.
        """
        if not half and half_gradients:
            raise ValueError("without --half there is no half precision for gradients to travel in")
        if half and half not in [known.value for known in Half]:
            known = ", ".join(known.value for known in Half)
            raise ValueError(f"there is no half precision {half!r}; known are {known}")
        return cls(half=Half(half), level=level, half_gradients=half_gradients) if half else None


class KernelLibrary(Enum):
    """The library that runs the kernels of layers; the values are the API's names. See `WaferPlan.kernel_library`."""

    ATEN = "aten"
    INDUCTOR = "inductor"

    @property
    def code(self) -> "plan_pb2.KernelLibrary.ValueType":
        """The library as plans name it."""
        return plan_pb2.KernelLibrary.Value(f"KERNEL_LIBRARY_{self.name}")

    @classmethod
    def from_proto(cls, code: "plan_pb2.KernelLibrary.ValueType") -> "KernelLibrary":
        """From a message. Raises ValueError for a library that does not exist."""
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
        """From a message. Raises ValueError for a strategy that does not exist."""
        if code == plan_pb2.EXECUTION_STRATEGY_UNSPECIFIED:
            return cls.WEIGHT_STREAMING
        for strategy in cls:
            if plan_pb2.ExecutionStrategy.Value(f"EXECUTION_STRATEGY_{strategy.name}") == code:
                return strategy
        raise ValueError(f"there is no execution strategy {code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything that a plan depends on besides the step.

    Attributes:
        num_csx: number of wafers.
        num_shards: number of MemoryX shards.
        pinned_shards: by state, the shard on which it lies already, since an earlier execution.
        wafer_memory_bytes: memory of a wafer.
        prefetch_layers: weights stay on a wafer between two uses if at most so many segments lie between them.
        drops_weights: whether weights leave a wafer over longer gaps, though it has room for them.
        micro_batches: number of micro-batches of a wafer, or of each replica.
        recomputes: whether the backward pass computes a layer's activations again, instead of keeping them.
        row_slices: the most slices in which a kernel computes a row; 1: at once.
        slices_attention: whether slices go through causal attention, too, where heads then share their keys.
        saves_memory: whether layers are divided into sublayers, too, and kernels reuse memory.
        precision: mixed precision; None: float32 throughout.
        kernel_library: the library that runs the kernels of layers.
        execution_strategy: weight streaming or layer pipelined mode.
        num_replicas: copies of the model on a pipelined wafer, each with its share of the batch.
        asynchronous_updates: whether a pipelined wafer updates weights for each micro-batch, with others in flight.
        wafer_cores: cores of a wafer's host, which is the most regions of a pipelined wafer.
        strict_sharding: whether a step is refused that gathers values of the batch.
    """

    num_csx: int
    num_shards: int
    pinned_shards: Mapping[str, int] = field(default_factory=dict)
    wafer_memory_bytes: int = DEFAULT_WAFER_MEMORY_BYTES
    prefetch_layers: int = 4
    drops_weights: bool = False
    micro_batches: int = 1
    recomputes: bool = False
    row_slices: int = 1
    slices_attention: bool = False
    saves_memory: bool = False
    precision: Precision | None = None
    kernel_library: KernelLibrary = KernelLibrary.ATEN
    execution_strategy: ExecutionStrategy = ExecutionStrategy.WEIGHT_STREAMING
    num_replicas: int = 1
    asynchronous_updates: bool = False
    wafer_cores: int = 2
    strict_sharding: bool = False

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
        """The number of parts of the batch, over wafers and replicas, and over time."""
        return self.num_csx * self.num_replicas * self.micro_batches

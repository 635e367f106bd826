"""The tree of flags of the CSX backend."""

from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from cstorch.backends.flag import Flag, Flags, anything, at_most, boolean, count, one_of, optional, text, whole_number
from cstorch.backends.open_settings import OpenSettings
from cstorch.errors import ConfigurationError
from waferbox.limits import MAX_RESTARTS, MAX_UINT32, MAX_WAFER_GIB

MicroBatchSize: TypeAlias = Literal["auto", "explore"] | dict[str, dict[str, int]] | int | None

_TRANSFER = "tensors travel as the lane of the ClusterConfig says"
_HARDWARE = "it steers hardware, or the compiler for it, that is not here"
_KERNELS = "kernels are torch's own"
_PROCESSES = "processes take the memory that they need"


def _micro_batch_size(value: Any) -> MicroBatchSize:
    if value in ("auto", "explore", None) or _is_micro_batch(value):
        size: MicroBatchSize = value
        return size
    if isinstance(value, dict) and value.keys() == {"explore"} and isinstance(value["explore"], dict):
        bounds = value["explore"]
        if bounds.keys() <= {"min", "max"} and all(map(_is_micro_batch, bounds.values())):
            return value
    raise ConfigurationError(
        'must be "auto", "explore", {"explore": {"min": int, "max": int}}, an int of at least 1, or None, where each '
        f"int is at most {MAX_UINT32}"
    )


def _is_micro_batch(rows: Any) -> bool:
    return type(rows) is int and 1 <= rows <= MAX_UINT32


def _settings(value: Any) -> Any:
    return SimpleNamespace(**value) if isinstance(value, dict) else value


def _debug_args(value: Any) -> Any:
    return OpenSettings(**value) if isinstance(value, dict) else value


class Precision(Flags):
    """The precision of steps.

    Attributes:
        optimization_level: With mixed precision, how much is computed in half: 0 the least, 2 the most.
        half_gradients: Whether gradients of weights travel from the wafers in half, as weights travel to them: half of
            the bytes on the way back. With mixed precision in float16 or bfloat16, and in weight streaming only. Each
            wafer rounds its part once; parts are added in float32, and each SwarmX node that adds rounds its sum.
            (Waferbox only.)
    """

    optimization_level = Flag(1, one_of(0, 1, 2))
    half_gradients = Flag(False, boolean)


class Performance(Flags):
    """The speed of steps.

    Attributes:
        micro_batch_size: The rows of its batch that a wafer computes at a time: an int that divides them (else the next
            below that does is taken, with a warning); "auto", as many as its memory has room for; "explore", the number
            for which a step is predicted to be the fastest, or {"explore": {"min": ..., "max": ...}}; None, all at
            once. The numbers are the same up to rounding.
        kernel_library: The kernels of layers: "aten", torch's own calls, or "inductor", kernels that torch generates.
            These take seconds each to build, once for a cache, and gain little on a CPU. (Waferbox only.)
        execution_strategy: "weight_streaming", or "pipeline" for layer pipelined mode: all layers of a model that fits
            are on the one wafer at once, with their weights. None: that of the environment variable
            WAFERBOX_EXECUTION_STRATEGY, else weight streaming. If it changes between executions, weights move.
            (Waferbox only.)
        num_replicas: In layer pipelined mode, the number of copies of a small model on the wafer, each with its share
            of the batch. In weight streaming it changes nothing. (Waferbox only.)
        asynchronous_updates: In layer pipelined mode, whether weights are updated for each micro-batch, as soon as its
            backward pass is done, while others are in flight. The optimizer, with its schedule, then steps once for
            each micro-batch: other numbers, and fewer bubbles. In weight streaming it changes nothing. (Waferbox only.)
        strict_sharding: Whether a step is refused in which an operation mixes rows of different wafers, so that they
            have to be gathered. Without it there is a warning, with the lines and the cost. None: that of the
            environment variable WAFERBOX_STRICT_SHARDING, else False. (Waferbox only.)
    """

    micro_batch_size = Flag[MicroBatchSize]("auto", _micro_batch_size)
    transfer_processes = Flag(5, count, without_effect=_TRANSFER)
    max_transfer_bytes = Flag(256 * 1024 * 1024, count, without_effect=_TRANSFER)
    compress_weights = Flag(False, boolean, without_effect=_TRANSFER)
    use_speculative_optimizers = Flag(True, boolean, without_effect="an update begins when all that it needs is there")
    kernel_library = Flag("aten", one_of("aten", "inductor"))
    num_replicas = Flag(1, at_most(MAX_UINT32, count))
    asynchronous_updates = Flag(False, boolean)
    execution_strategy = Flag[str | None](None, optional(one_of("weight_streaming", "pipeline")))
    strict_sharding = Flag[bool | None](None, optional(boolean))


class Cluster(Flags):
    """The use of the cluster.

    Attributes:
        max_num_restarts: The number of restarts in a row without progress after which a death ends the job; 0: the
            first death ends it. None: that of the environment variable WAFERBOX_MAX_NUM_RESTARTS, else 3. (Waferbox
            only.)
        min_num_csx: The fewest wafers that a job resumes with if a dead one has no replacement; the batch is divided
            anew. None: that of the environment variable WAFERBOX_MIN_NUM_CSX, else all. (Waferbox only.)
    """

    max_num_restarts = Flag[int | None](None, optional(at_most(MAX_RESTARTS, whole_number)))
    min_num_csx = Flag[int | None](None, optional(count))

    auto_taint = Flag(False, boolean, without_effect=_HARDWARE)


class S3(Flags):
    """Access to S3."""

    profile = Flag[str | None](None, optional(text), without_effect="checkpoints are files")


class Storage(Flags):
    """The storage of checkpoints."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.__dict__["s3"] = S3(f"{path}.s3")

    s3: S3


class Debug(Flags):
    """Aids to find an error.

    Attributes:
        lazy_initialization: Whether weights made under `with backend.device:` are initialised on the cluster. Without
            it, state cannot be changed between executions (see ClusterConfig.changes_need_checkpoint).
        log_initialization: Whether `compile` logs how much it moved to the device.
        retrace_every_iteration: Whether the traced function is called in every step. It must do the same each time,
            since the cluster runs the program of the first step; but print and breakpoints in it are reached each time.
        ini, debug_args: Settings of the real system's compiler.
        wafer_memory_gi: The memory of a wafer in GiB; 8 by default, and with `compile_only` and no cluster 44 GB, as a
            CS-3 has. A step that needs more is refused when it is compiled. (Waferbox only.)
    """

    ini = Flag[Any](SimpleNamespace(), _settings, without_effect=_HARDWARE)
    debug_args = Flag[Any](OpenSettings(), _debug_args, without_effect=_HARDWARE)
    drop_data = Flag(False, boolean, without_effect="the wafers compute with the data that reaches them")
    lazy_initialization = Flag(True, boolean)
    skip_weight_init = Flag(False, boolean, without_effect="weights are always initialised")
    optimize_initialization = Flag(True, boolean, without_effect="initialisation runs as the script has it")
    log_initialization = Flag(True, boolean)
    retrace_every_iteration = Flag(False, boolean)
    implicit_cast_cb16_to_fp32 = Flag(False, boolean, without_effect=_KERNELS)
    save_gpv = Flag(False, boolean, without_effect=_HARDWARE)
    check_constraints = Flag(True, boolean, without_effect=_HARDWARE)
    op_definition_module = Flag[str | None](None, optional(text), without_effect=_KERNELS)
    skip_connectivity_check = Flag(False, boolean, without_effect="a cluster that does not answer is always reported")
    fabric_type_blacklist = Flag[Any](None, anything, without_effect=_HARDWARE)
    wafer_memory_gi = Flag[int | None](None, optional(at_most(MAX_WAFER_GIB, count)))
    compile_crd_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)
    execute_crd_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)
    act_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)
    cmd_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)
    wgt_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)
    wrk_memory_gi = Flag[int | None](None, optional(count), without_effect=_PROCESSES)


class Csx(Flags):
    """All flags of the CSX backend, by topic."""

    def __init__(self) -> None:
        super().__init__("csx")
        self.__dict__.update(
            precision=Precision("csx.precision"),
            performance=Performance("csx.performance"),
            cluster=Cluster("csx.cluster"),
            storage=Storage("csx.storage"),
            debug=Debug("csx.debug"),
        )

    precision: Precision
    performance: Performance
    cluster: Cluster
    storage: Storage
    debug: Debug

"""The compile of a step on the cluster, with the script's options."""

import logging
from typing import Final

from cstorch import backends
from cstorch._internal.log import logged_if_slow
from cstorch._internal.session.cluster_session import Target
from cstorch._internal.session.job import ClientJob
from cstorch.backends.csx_flags import MicroBatchSize
from cstorch.backends.mixed_precision import get_half_dtype_str, mixed_precision
from cstorch.distributed.run_settings import strict_sharding
from cstorch.errors import ConfigurationError
from wsc.v1 import coordinator_pb2, plan_pb2

logger = logging.getLogger("cstorch.execution")

# The memory of the real system's wafer, a CS-3.
_REAL_WAFER_BYTES: Final = 44_000_000_000


def compile_step(target: Target, text: str, *, trains: bool) -> tuple[ClientJob, coordinator_pb2.CompileResponse]:
    """Compiles a step on the cluster, which may find it in its cache.

    Args:
        target: The target of the execution, with a session.
        text: The step as CIRH.
        trains: Whether an optimizer steps in it.

    Returns:
        The job, and the response to the compile.

    Raises:
        CompileError: The step has no plan on this cluster.
        ClusterError: The cluster cannot be reached, or failed.
        ConfigurationError: Flags contradict each other.
    """
    session = target.session
    assert session is not None
    session.check_compile(target.config, trains=trains)
    options = _compile_options()
    if target.compile_only and not target.config.named_management()[0] and not options.wafer_memory_bytes:
        # Nothing will run here, so that the plan is for the machine that the script is meant for.
        options.wafer_memory_bytes = _REAL_WAFER_BYTES
        logger.info(
            "No wafer will run the step: it is planned for a CS-3, with 44 GB of memory "
            "(cstorch.backends.csx.debug.wafer_memory_gi sets another size)"
        )
    logger.debug("Compiling the model. This may take a few minutes.")
    logger.debug("No image is built: input workers run in the Python environment of the script")
    with logged_if_slow("Opening a job of the cluster"):
        job = session.job()
    logger.debug("Compile job id: %s%s", job.name, f", log path: {session.log_path}" if session.log_path else "")
    job.wait_until_ready()
    logger.debug("The coordinator of the job is ready")
    options.execution_strategy = job.strategy
    if job.strategy == plan_pb2.EXECUTION_STRATEGY_PIPELINE:
        options.num_replicas = backends.csx.performance.num_replicas
        options.asynchronous_updates = backends.csx.performance.asynchronous_updates
    if options.HasField("precision"):
        level = options.precision.optimization_level
        gradients = ", gradients travel in it" if options.precision.half_gradients else ""
        logger.info("Mixed precision: %s, optimization level %d%s", get_half_dtype_str(), level, gradients)
    with logged_if_slow("Compiling the step") as work:
        compiled = job.compile(text, options, work)
    found = "Found in the cache and verified" if compiled.cached else "Compiled"
    where = " (on the cluster)" if job.gateway else ""
    report = f": {compiled.report}{where}" if compiled.report else ""
    wafers = target.config.num_csx
    logger.info("%s in %.1f s, for %s on %d CSX%s", found, compiled.seconds, job.name, wafers, report)
    logger.debug("Compile artifact: %s", compiled.artifact)
    for note in compiled.notes:
        logger.info("%s", note)
    for warning in compiled.warnings:
        logger.warning("%s", warning)
    logger.debug("Compile was successful!")
    if target.compile_only:
        logger.info("With compile_only nothing is run, and no weights were sent")
    return job, compiled


def half_type() -> "plan_pb2.HalfType.ValueType":
    """The half type of mixed precision, as a value of the messages."""
    return plan_pb2.HalfType.Value(f"HALF_TYPE_{get_half_dtype_str().upper()}")


def _compile_options() -> plan_pb2.CompileOptions:
    library = backends.csx.performance.kernel_library
    options = plan_pb2.CompileOptions(
        kernel_library=plan_pb2.KernelLibrary.Value(f"KERNEL_LIBRARY_{library.upper()}"),
        wafer_memory_bytes=(backends.csx.debug.wafer_memory_gi or 0) << 30,
        strict_sharding=strict_sharding(),
    )
    micro_batching = _micro_batching(backends.csx.performance.micro_batch_size)
    if micro_batching is not None:
        options.micro_batching.CopyFrom(micro_batching)
    if mixed_precision():
        options.precision.half = half_type()
        options.precision.optimization_level = backends.csx.precision.optimization_level
        options.precision.half_gradients = backends.csx.precision.half_gradients
    elif backends.csx.precision.half_gradients:
        raise ConfigurationError(
            "cstorch.backends.csx.precision.half_gradients: steps are compiled for float32 throughout, so there is no "
            "half for gradients to travel in: call cstorch.amp.enable_mixed_precision() before, or leave it False"
        )
    return options


def _micro_batching(size: MicroBatchSize) -> plan_pb2.MicroBatching | None:
    match size:
        case None:
            return None
        case int():
            return plan_pb2.MicroBatching(size=size)
        case "auto":
            return plan_pb2.MicroBatching()
        case "explore":
            return plan_pb2.MicroBatching(explore=True)
    bounds = size["explore"]
    return plan_pb2.MicroBatching(explore=True, min_size=bounds.get("min", 0), max_size=bounds.get("max", 0))

"""`import cerebras.framework.torch.core.cb_model as cm`: this process, its session and its run."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, TypeVar

import torch
from torch.utils import _pytree as pytree

from cerebras_torch.run import current_run
from cerebras_torch.session import current_session
from cstorch import backends
from cstorch._internal import absent
from cstorch.backend import current_torch_device as device
from cstorch.backend import use_cs
from cstorch.core.closures import step_closure
from cstorch.core.tensors import make_constant
from cstorch.distributed import (
    WORKER_CACHE_ROOT,
    get_ordinal,
    get_streaming_batch_size,
    get_streaming_rank,
    is_master_ordinal,
    is_receiver,
    is_streamer,
    num_receivers,
    num_streamers,
    num_tasks,
    service_resolver,
)
from cstorch.distributed import hit_worker_cache_limit as _hit_worker_cache_limit
from cstorch.utils.progress import progress_line
from cstorch.utils.tracker import RateTracker

__all__ = [
    "METRIC_NAME_PREFIX",
    "WORKER_CACHE_ROOT",
    "RateTracker",
    "device",
    "get_ordinal",
    "get_run_step",
    "get_streaming_batch_size",
    "get_streaming_rank",
    "hit_worker_cache_limit",
    "is_appliance",
    "is_master_ordinal",
    "is_receiver",
    "is_streamer",
    "is_sync_mode",
    "is_wse_device",
    "make_constant",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "metrics_counter_value",
    "num_receivers",
    "num_streamers",
    "num_tasks",
    "print_metrics_report",
    "print_update",
    "rendezvous",
    "run_step_closures",
    "save",
    "service_resolver",
    "set_attribute",
    "set_metric_state_names",
    "set_rng_state",
    "set_run_config",
    "set_state_names",
    "set_target_num_replicas",
    "step_closure",
    "to_cpu",
    "use_cs",
    "write_to_summary",
]

__getattr__ = absent.getter("cerebras_torch.core.cb_model")

logger = logging.getLogger("cstorch.progress")

Value = TypeVar("Value")
Result = TypeVar("Result")

METRIC_NAME_PREFIX = "metric"  # where old checkpoints have the state of metrics

is_wse_device = use_cs
is_appliance = use_cs


def is_sync_mode() -> bool:
    """Returns False: whole steps are recorded, so the script does not wait for each operation.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return False


# --- The run ----------------------------------------------------------------------------------------------------------


def set_run_config(num_steps: int, checkpoint_steps: int = 0, fetch_steps: int = 1) -> None:
    """Sets the number of steps from here on, and the steps with state and values.

    Args:
        num_steps: The number of steps after which loops over a cbtorch.dataloader end, in all.
        checkpoint_steps: k for state that can be saved on every k-th step and the last of a pass; 0: none.
        fetch_steps: k for step closures on every k-th step and the last of a pass; 0: on the last only.

    Raises:
        ConfigurationError: There are no steps, or an interval is negative.
        UsageError: Nothing is initialized yet.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    current_run().set_config(num_steps, checkpoint_steps, fetch_steps)


def get_run_step() -> int:
    """Returns the number of steps of this process so far, with the current one.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return current_run().steps


def mark_step() -> None:
    """Ends the step of the open session, if there is one.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    session = current_session()
    if session is not None:
        session.mark_step()


def run_step_closures() -> None:
    """Ends the step, and so runs its step closures.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    mark_step()


def set_target_num_replicas(num_replicas: int) -> None:
    """Sets the number of copies of the model on one wafer in layer pipelined mode. No number depends on it.

    Args:
        num_replicas: The number of copies, at least 1.

    Raises:
        ConfigurationError: It is less than 1.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    backends.csx.performance.num_replicas = num_replicas


def set_state_names(state: Mapping[str, Any]) -> None:
    """Accepts names of the state; Waferbox takes those of the modules.

    Args:
        state: The state by name.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """


def set_metric_state_names(state: Mapping[str, Any], name: str) -> None:
    """Accepts names of a metric's state; Waferbox takes those of the modules.

    Args:
        state: The state by name.
        name: The name of the metric.
    """


def set_attribute(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Accepts a note for the old compiler on a tensor; no number depends on it.

    Args:
        tensor: The tensor.
        name: The name of the note.
        value: The note.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """


# --- Values -----------------------------------------------------------------------------------------------------------


def set_rng_state(seed: int) -> None:
    """Seeds torch's generator, from which the cluster's random numbers start too.

    Args:
        seed: The seed.
    """
    torch.manual_seed(seed)


class CacheLimit(NamedTuple):
    """The answer of `hit_worker_cache_limit`: true or false in release 1.8, a tuple in later ones.

    is_hit: Whether the copy would fill the disk too much.
    wanted: The bytes of the folder.
    available: The bytes that a copy may have.
    """

    is_hit: bool
    wanted: int
    available: int

    def __bool__(self) -> bool:
        return self.is_hit


def hit_worker_cache_limit(src_dir: str, dest_dir: str) -> CacheLimit:
    """Computes whether a copy of a folder would fill the disk of the worker cache to more than four fifths.

    Args:
        src_dir: The folder to copy.
        dest_dir: The place of the copy, below WORKER_CACHE_ROOT. Its present content would be replaced.

    Returns:
        Whether it would; the bytes of `src_dir`; and the bytes that a copy may have. It is true if the first is.

    Raises:
        ValueError: `dest_dir` lies outside of WORKER_CACHE_ROOT.
    """
    return CacheLimit(*_hit_worker_cache_limit(src_dir, dest_dir))


def to_cpu(data: Any) -> Any:
    """Returns the same nest with CPU tensors. Not within a step, whose tensors have no values.

    Args:
        data: The nest.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), data)


def save(
    state: Any,
    file: str | os.PathLike[str],
    master_only: bool = True,
    post_transfer_callback: Callable[[Any], Any] | None = None,
) -> None:
    """Saves a nest as torch.save does, with CPU tensors. In a loop, call it in step closures of checkpoint steps only.

    Args:
        state: The nest.
        file: The path of the file.
        master_only: Whether only the first process writes; there is one.
        post_transfer_callback: A function of the nest of CPU tensors whose result is saved in its place; None: none.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    state = to_cpu(state)
    if post_transfer_callback is not None:
        state = post_transfer_callback(state)
    torch.save(state, file)


# --- Other processes: none of them runs the script --------------------------------------------------------------------


def rendezvous(tag: str, payload: Value | str = "", replicas: Sequence[int] = ()) -> list[Value | str]:
    """Returns the payloads of all processes that run the script: there is one.

    Args:
        tag: The name of the meeting.
        payload: The payload of this process.
        replicas: Accepted without effect.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return [payload]


def mesh_reduce(tag: str, data: Value, reduce_fn: Callable[[list[Value]], Result]) -> Result:
    """Returns a reduction over all processes that run the script: there is one.

    Args:
        tag: The name of the reduction.
        data: The data of this process.
        reduce_fn: A function of the list of all data.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return reduce_fn([data])


# --- Output -----------------------------------------------------------------------------------------------------------


def master_print(*values: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """Prints, in the first process.

    Args:
        *values: The values to print.
        fd: The stream; None: stdout.
        local: Whether to ask for the first process of the container.
        flush: Whether to flush the stream.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    if is_master_ordinal(local):
        print(*values, file=fd or sys.stdout, flush=flush)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Writes scalars to a writer, if there is one.

    Args:
        summary_writer: The writer, or None.
        global_step: The step.
        dict_to_write: The scalars by name.
        write_xla_metrics: Accepted without effect.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    if summary_writer is not None:
        for name, value in (dict_to_write or {}).items():
            summary_writer.add_scalar(name, float(value), global_step)


def print_update(device: Any, step: int, loss: float, mode: str, summary_writer: Any = None) -> None:
    """Logs the line of a step, with the rate so far, and writes the loss to the writer, if there is one.

    Args:
        device: Accepted without effect: the line has the backend's name.
        step: The step.
        loss: The loss.
        mode: "train" or "eval".
        summary_writer: The writer, or None.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    rates = current_run().rate_tracker
    rate, global_rate = (0.0, 0.0) if rates is None else (rates.rate(), rates.global_rate())
    kind = "CSX" if use_cs() else "CPU"
    logger.info(progress_line(mode.capitalize(), kind, step, loss, rate, global_rate))
    write_to_summary(summary_writer, step, {"loss": loss})


def _extract_tracker_details(step: int) -> tuple[float, float, float]:
    """Returns the latest and the overall rate in samples per second, and samples per step. Scripts use this name.

    Args:
        step: The step.
    """
    rates = current_run().rate_tracker
    if rates is None:
        return 0.0, 0.0, 0.0
    return rates.rate(), rates.global_rate(), rates.total_count / max(step, 1)


def print_metrics_report() -> None:
    """Logs the number of samples of the newest pass over a loader, and its duration.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    rates = current_run().rate_tracker
    if rates is not None:
        logger.info("%d samples in %.3f s", rates.total_count, rates.elapsed_seconds())


def metrics_counter_value(name: str) -> int | None:
    """Returns None, as the old runtime does for counters that it does not have.

    Args:
        name: The name of the counter.

    Reference: releases 1.2 to 1.7, `cerebras_torch.core.cb_model`.
    """
    return None

"""`import cerebras.framework.torch.core.cb_model as cm`: this process, its session and its run."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

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
    hit_worker_cache_limit,
    is_master_ordinal,
    is_receiver,
    is_streamer,
    num_receivers,
    num_streamers,
    num_tasks,
    service_resolver,
)
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
    """Whether the script waits for the device after each operation. Never: whole steps are recorded."""
    return False


# The run.


def set_run_config(num_steps: int, checkpoint_steps: int = 0, fetch_steps: int = 1) -> None:
    """Says how the steps from here on go.

    Args:
        num_steps: loops over a cbtorch.dataloader end after so many, in all.
        checkpoint_steps: k for state that can be saved on every k-th step and the last of a pass; 0: none.
        fetch_steps: k for step closures on every k-th step and the last of a pass; 0: on the last only.

    Raises:
        ConfigurationError: there are no steps, or an interval is negative.
        UsageError: nothing is initialized yet.
    """
    current_run().set_config(num_steps, checkpoint_steps, fetch_steps)


def get_run_step() -> int:
    """The steps of this process so far, with the one at hand."""
    return current_run().steps


def mark_step() -> None:
    """Ends the step of the open session, if there is one."""
    session = current_session()
    if session is not None:
        session.mark_step()


def run_step_closures() -> None:
    """Runs the step closures that wait for their step: ends it."""
    mark_step()


def set_target_num_replicas(num_replicas: int) -> None:
    """Has so many copies of the model on one wafer in layer pipelined mode; no number depends on it.

    Raises:
        ConfigurationError: it is less than 1.
    """
    backends.csx.performance.num_replicas = num_replicas


def set_state_names(state: Mapping[str, Any]) -> None:
    """Accepts names of the state; Waferbox takes those of the modules."""


def set_metric_state_names(state: Mapping[str, Any], name: str) -> None:
    """Accepts names of a metric's state; Waferbox takes those of the modules."""


def set_attribute(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Accepts a note for the old compiler on a tensor; no number depends on it."""


# Values.


def set_rng_state(seed: int) -> None:
    """Seeds torch's generator, from which also the cluster's random numbers start."""
    torch.manual_seed(seed)


def to_cpu(data: Any) -> Any:
    """The same nest with CPU tensors. Not within a step, whose tensors have no values."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), data)


def save(
    state: Any,
    file: str | os.PathLike[str],
    master_only: bool = True,
    post_transfer_callback: Callable[[Any], Any] | None = None,
) -> None:
    """As torch.save, with CPU tensors. Within a loop only in step closures of checkpoint steps (`set_run_config`).

    Args:
        state: any nest.
        file: where to.
        master_only: write in the first process only; there is one.
        post_transfer_callback: what it makes of the nest of CPU tensors is saved.
    """
    state = to_cpu(state)
    if post_transfer_callback is not None:
        state = post_transfer_callback(state)
    torch.save(state, file)


# Other processes: there are none that run the script.


def rendezvous(tag: str, payload: Value | str = "", replicas: Sequence[int] = ()) -> list[Value | str]:
    """Waits for all processes that run the script; returns their payloads."""
    return [payload]


def mesh_reduce(tag: str, data: Value, reduce_fn: Callable[[list[Value]], Result]) -> Result:
    """reduce_fn of the data of all processes that run the script."""
    return reduce_fn([data])


# What is shown.


def master_print(*values: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """print, in the first process."""
    if is_master_ordinal(local):
        print(*values, file=fd or sys.stdout, flush=flush)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Gives the writer, if it is not None, the scalars of a mapping. write_xla_metrics: there are none to write."""
    if summary_writer is not None:
        for name, value in (dict_to_write or {}).items():
            summary_writer.add_scalar(name, float(value), global_step)


def print_update(device: Any, step: int, loss: float, mode: str, summary_writer: Any = None) -> None:
    """Logs the line of a step, with the rate so far, and gives the writer, if there is one, the loss."""
    rates = current_run().rate_tracker
    rate, global_rate = (0.0, 0.0) if rates is None else (rates.rate(), rates.global_rate())
    kind = "CSX" if use_cs() else "CPU"
    logger.info(progress_line(mode.capitalize(), kind, step, loss, rate, global_rate))
    write_to_summary(summary_writer, step, {"loss": loss})


def _extract_tracker_details(step: int) -> tuple[float, float, float]:
    """Samples per second so far, lately and on the whole, and samples per step. Scripts ask for this private name."""
    rates = current_run().rate_tracker
    if rates is None:
        return 0.0, 0.0, 0.0
    return rates.rate(), rates.global_rate(), rates.total_count / max(step, 1)


def print_metrics_report() -> None:
    """Logs how many samples the newest pass over a loader has taken, and in what time."""
    rates = current_run().rate_tracker
    if rates is not None:
        logger.info("%d samples in %.3f s", rates.total_count, rates.elapsed_seconds())


def metrics_counter_value(name: str) -> int | None:
    """A counter of the old runtime: None, as for those that it did not have."""
    return None

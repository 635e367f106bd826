"""A node that is refused memory is given up: what it had is free then, and it, or another, has its place anew."""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from cluster_in_process import Client, ClusterInProcess

from waferbox.host.memory import is_refused_memory
from wsc.v1 import management_pb2, node_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
NUM_STEPS = 40
TORCH = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


class Refusal:
    """Of memory, in a step, so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times = times
        self._error = error

    def __call__(self, context: object, step: int = 3) -> None:
        if step == 3 and self.times:
            self.times -= 1
            raise self._error


def begun(cluster: ClusterInProcess, client: Callable[..., Client], max_num_restarts: int) -> Any:
    cluster.add(**FULL)
    one = client(max_num_restarts=max_num_restarts, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    return one


@pytest.mark.defects
@pytest.mark.parametrize("name", ["wafer-0", "memoryx-0"])
def test_a_step_that_was_refused_memory_once_is_run_again(
    cluster: ClusterInProcess, client: Callable[..., Client], name: str
) -> None:
    cluster.behaviour.on_step[name] = Refusal(1, RuntimeError(TORCH))
    one = begun(cluster, client, 3)
    one.start()
    assert one.consume(NUM_STEPS) == list(range(1, NUM_STEPS + 1))
    one.receive("finished")
    cluster.until(lambda: cluster.jobs()[0].restarts)
    (restart,) = cluster.jobs()[0].restarts
    assert f"{name} (pid " in restart.cause
    assert " was refused memory: RuntimeError: " in restart.cause
    assert "test_refused_memory.py" in restart.cause


@pytest.mark.defects
@pytest.mark.parametrize("where", ["on_step", "on_load"])
def test_one_that_is_refused_it_every_time_ends_the_job_with_all_causes(
    cluster: ClusterInProcess, client: Callable[..., Client], where: str
) -> None:
    refusal = Refusal(100, MemoryError("no room"))
    getattr(cluster.behaviour, where)["wafer-0"] = refusal
    one = begun(cluster, client, 2)
    if where == "on_step":
        with contextlib.suppress(AssertionError):  # it may end before the first recovery point is complete
            one.start()
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    (cause,) = (line for line in failure.message.splitlines() if "was refused memory: MemoryError: no room" in line)
    assert cause.startswith("  1. to 3. wafer-0 ")
    assert refusal.times <= 97
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)


@pytest.mark.defects
def test_it_ends_a_job_that_does_not_recover_with_the_traceback(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.behaviour.on_step["memoryx-0"] = Refusal(1, MemoryError("no room"))
    one = begun(cluster, client, 0)
    one.start()
    failure = one.failure()
    assert (failure.kind, failure.node) == (node_pb2.Failure.KIND_INTERNAL, "memoryx-0")
    assert failure.message == "memoryx-0 was refused memory: MemoryError: no room"
    assert "in __call__" in failure.traceback


@pytest.mark.defects
def test_too_few_descriptors_are_explained(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.behaviour.on_step["memoryx-0"] = Refusal(1, OSError(errno.EMFILE, "Too many open files"))
    one = begun(cluster, client, 2)
    one.start()
    failure = one.failure()
    assert (failure.kind, failure.node) == (node_pb2.Failure.KIND_USER, "memoryx-0")
    assert re.fullmatch(
        r"Too many open files: a process may have \d+\. Raise that, with `ulimit -n`, and start again", failure.message
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError(TORCH), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        (RuntimeError("shapes do not fit"), False),
    ],
    ids=repr,
)
def test_refusals_are_known_whoever_raises_them(error: Exception, expected: bool) -> None:
    assert is_refused_memory(error) == expected
    wrapped = ValueError("a kernel failed")
    wrapped.__cause__ = error
    assert is_refused_memory(wrapped) == expected

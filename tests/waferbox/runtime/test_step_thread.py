"""The thread of an execution, and what it tells."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from waferbox.links.hub import Stopped
from waferbox.links.link import LinkLost
from waferbox.runtime.role_job import StepThread
from wsc.v1 import node_pb2


class Context:
    """What an execution tells of itself goes to a function."""

    node = "memoryx-0"

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def emit(self, event: node_pb2.AttachResponse) -> None:
        assert event.HasField("failed") or event.finished.epoch == 3
        self._tell()


def finish() -> Mapping[str, float]:
    return {}


def lose_a_link() -> Mapping[str, float]:
    raise LinkLost("swarmx-0", "reset")


def meet_a_defect() -> Mapping[str, float]:
    raise ZeroDivisionError


@pytest.mark.defects
@pytest.mark.parametrize("steps", [finish, lose_a_link, meet_a_defect])
def test_who_is_told_that_it_is_over_finds_it_over(steps: Callable[[], Mapping[str, float]]) -> None:
    """The client reads states as soon as it is told, and is refused them while steps are run."""
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()
    context: Any = Context(lambda: found.put(execution.running))
    execution = StepThread(context, 3, steps, lambda: None)
    assert not execution.running
    execution.start()
    assert found.get(timeout=10.0) is False
    execution.stop(10.0)


def test_it_runs_until_its_steps_are_stopped() -> None:
    begun, interrupted = threading.Event(), threading.Event()

    def steps() -> Mapping[str, float]:
        begun.set()
        assert interrupted.wait(10.0)
        raise Stopped

    execution = StepThread(cast(Any, Context(pytest.fail)), 3, steps, interrupted.set)
    execution.start()
    assert begun.wait(10.0)
    assert execution.running
    execution.stop(10.0)
    assert not execution.running

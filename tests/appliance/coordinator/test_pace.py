"""Which step the nodes are told to keep a recovery point after: one that comes soon, and that none has begun."""

import types

import pytest

from appliance.coordinator.observation import spans
from appliance.coordinator.observation.spans import Pace
from wsc.v1 import observation_pb2


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(spans, "time", types.SimpleNamespace(time=lambda: now.seconds))
    return now


def report(node: str, step: int, time: float, total: float, epoch: int = 1) -> observation_pb2.NodeReport:
    return observation_pb2.NodeReport(node=node, epoch=epoch, step=step, time=time, seconds={"total": total})


def test_the_burst_at_the_beginning_of_an_execution_is_not_taken_for_its_pace() -> None:
    """Nodes are some steps ahead of the client at once, and then as slow as it is."""
    one = Pace()
    one.reported(report("wafer-0", 21, 999.0, 0.25))
    assert one.step_after(0.5, 1) is None
    one.reported(report("wafer-0", 45, 1000.0, 1.25))
    assert one.step_after(0.5, 1) == 45 + 12 + 1


def test_steps_that_take_longer_than_reports_are_told_by_the_whole_execution() -> None:
    one = Pace()
    for second in range(5):
        one.reported(report("wafer-0", 5, 996.0 + second, 100.0))
    assert one.step_after(0.5, 1) == 7


def test_the_node_that_is_ahead_counts(now: types.SimpleNamespace) -> None:
    one = Pace()
    for second in range(3):
        one.reported(report("wafer-0", 10 + second, 998.0 + second, 5.0))
        one.reported(report("worker-0", 30 + 2 * second, 998.0 + second, 5.0))
    now.seconds += 1.0
    assert one.step_after(0.5, 1) == 34 + 3 + 1


def test_reports_of_an_earlier_epoch_say_nothing() -> None:
    one = Pace()
    one.reported(report("wafer-0", 10, 998.0, 5.0))
    one.reported(report("wafer-0", 12, 999.0, 6.0))
    assert one.step_after(0.5, 2) is None
    one.reported(report("wafer-0", 4, 999.5, 0.1, epoch=2))
    assert one.step_after(0.5, 2) is None
    one.reported(report("wafer-0", 8, 1000.0, 0.6, epoch=2))
    assert one.step_after(0.5, 2) == 8 + 4 + 1

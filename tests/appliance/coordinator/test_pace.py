"""The step after which the nodes keep a recovery point: one that comes soon, and that none has begun."""

import pytest

from appliance.coordinator.observation.spans import Pace
from wsc.v1 import observation_pb2


class Now:
    """A clock whose time a test sets. Those of the nodes are an hour ahead."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return int(self.seconds * 1e9)


class Reports:
    """The reports of nodes, and the pace that follows from them."""

    def __init__(self) -> None:
        self.now = Now()
        self.pace = Pace(self.now)

    def add(self, node: str, step: int, time: float, total: float, epoch: int = 1) -> None:
        self.now.seconds = time
        report = observation_pb2.NodeReport(
            node=node, epoch=epoch, step=step, time=time + 3600.0, seconds={"total": total}
        )
        self.pace.reported(report)


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_the_burst_at_the_beginning_of_an_execution_is_not_taken_for_its_pace(reports: Reports) -> None:
    """Nodes are some steps ahead of the client at once, and then as slow as it is."""
    reports.add("wafer-0", 21, 999.0, 0.25)
    assert reports.pace.step_after(0.5, 1) is None
    reports.add("wafer-0", 45, 1000.0, 1.25)
    assert reports.pace.step_after(0.5, 1) == 45 + 12 + 1


def test_steps_that_take_longer_than_reports_are_told_by_the_whole_execution(reports: Reports) -> None:
    for second in range(5):
        reports.add("wafer-0", 5, 996.0 + second, 100.0)
    assert reports.pace.step_after(0.5, 1) == 7


def test_the_node_that_is_ahead_counts(reports: Reports) -> None:
    for second in range(3):
        reports.add("wafer-0", 10 + second, 998.0 + second, 5.0)
        reports.add("worker-0", 30 + 2 * second, 998.0 + second, 5.0)
    reports.now.seconds += 1.0
    assert reports.pace.step_after(0.5, 1) == 34 + 3 + 1


def test_reports_of_an_earlier_epoch_say_nothing(reports: Reports) -> None:
    reports.add("wafer-0", 10, 998.0, 5.0)
    reports.add("wafer-0", 12, 999.0, 6.0)
    assert reports.pace.step_after(0.5, 2) is None
    reports.add("wafer-0", 4, 999.5, 0.1, epoch=2)
    assert reports.pace.step_after(0.5, 2) is None
    reports.add("wafer-0", 8, 1000.0, 0.6, epoch=2)
    assert reports.pace.step_after(0.5, 2) == 8 + 4 + 1

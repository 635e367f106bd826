"""The time that is left of an execution: a figure only where there is a basis for it."""

import pytest

from appliance.management.pace import Pace
from wsc.v1 import management_pb2

RUNNING, IDLE = management_pb2.JOB_PHASE_RUNNING, management_pb2.JOB_PHASE_IDLE


def report(step: int, phase: "management_pb2.JobPhase.ValueType" = RUNNING, num_steps: int = 1000) -> object:
    return management_pb2.JobReport(phase=phase, step=step, num_steps=num_steps)


def paced(*points: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, step in points:
        pace.add(report(step), now)  # type: ignore[arg-type]
    return pace


def test_nothing_is_known_before_there_is_a_basis() -> None:
    assert Pace().seconds_left(0.0) == 0
    assert paced((0.0, 0), (1.0, 0)).seconds_left(1.0) == 0
    assert paced((0.0, 1), (3.0, 20), (6.0, 40)).seconds_left(6.0) == 0
    assert paced((0.0, 1), (1.0, 20), (2.0, 40), (3.0, 60)).seconds_left(3.0) == 0
    assert paced((0.0, 100), (2.0, 200), (4.0, 300), (6.0, 400)).seconds_left(6.0) == pytest.approx(12)


def test_it_counts_down_between_reports_until_these_are_late() -> None:
    pace = paced((0.0, 100), (2.0, 200), (4.0, 300), (6.0, 400))
    assert pace.seconds_left(7.0) == pytest.approx(11)
    assert pace.seconds_left(20.0) == 0
    pace.add(report(410), 20.0)  # type: ignore[arg-type]
    assert pace.seconds_left(20.0) == 0  # the pace before says nothing about that afterwards


def test_the_pace_is_the_recent_one() -> None:
    fast = [(float(second), 1 + 10 * second) for second in range(21)]
    slow = [(20.0 + second, 201 + second) for second in range(1, 120)]
    last = slow[-1]
    assert paced(*fast, *slow).seconds_left(last[0]) == pytest.approx(1000 - last[1])


def test_slow_steps_have_a_figure_too() -> None:
    pace = paced(*((90.0 * step, step) for step in range(1, 11)))
    assert pace.seconds_left(900.0) == pytest.approx(990 * 90.0)
    assert pace.seconds_left(960.0) == pytest.approx(990 * 90.0 - 60)


@pytest.mark.parametrize("after", [report(0), report(50), report(401, num_steps=2000), report(400, IDLE)])
def test_another_execution_or_an_interruption_begins_anew(after: management_pb2.JobReport) -> None:
    pace = paced((0.0, 100), (2.0, 200), (4.0, 300), (6.0, 400))
    pace.add(after, 7.0)
    assert pace.seconds_left(7.0) == 0


def test_many_reports_take_little_memory() -> None:
    pace = paced(*((number / 100, 1 + number) for number in range(900)))
    assert pace.seconds_left(9.0) == pytest.approx(1.0, abs=0.2)
    assert len(pace._points) <= 20

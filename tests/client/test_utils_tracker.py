"""RateTracker under a clock of the test."""

import pytest

from cstorch._internal import step_clock
from cstorch.utils.tracker import RateTracker


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_clock, "time", clock)
    return clock


def test_rates(clock: Clock) -> None:
    rates = RateTracker(smooth_factor=0.5)
    assert (rates.rate(), rates.global_rate()) == (0, 0)
    rates.reset()
    rates.add(10)
    clock.now += 2
    assert rates.rate() == 5
    rates.add(30)
    clock.now += 2
    assert rates.rate() == 10
    assert rates.global_rate() == 10
    assert rates.total_count == 40
    assert rates.elapsed_seconds() == 4


def test_rates_are_those_of_the_told_times_and_not_of_when_it_is_asked(clock: Clock) -> None:
    rates = RateTracker(smooth_factor=0)
    for step in range(1, 5):  # a burst
        rates.add(10)
        rates.record_elapsed(2.0 * step)
        clock.now += 0.001
        assert rates.rate() == 5
    assert rates.global_rate() == 5
    assert rates.elapsed_seconds() == 8
    rates.reset()
    clock.now += 3
    assert rates.elapsed_seconds() == 3


def test_results_that_arrive_together_have_one_rate(clock: Clock) -> None:
    rates = RateTracker(smooth_factor=0)
    rates.add(10)
    clock.now += 1
    assert rates.rate() == 10
    for _ in range(3):  # they have waited for the process that receives them
        rates.add(10)
        clock.now += 0.00001
        assert rates.rate() == 10
    rates.add(10)
    clock.now += 4
    assert rates.rate() == pytest.approx(10, rel=1e-4)  # all four


def test_the_first_results_have_the_rate_since_the_begin(clock: Clock) -> None:
    rates = RateTracker()
    for count in range(1, 4):
        rates.add(10)
        clock.now += 0.01
        assert rates.rate() == pytest.approx(1000), count


def test_reset_time(clock: Clock) -> None:
    rates = RateTracker()
    rates.add(10)
    clock.now += 50
    rates.reset_time(offset=5)
    assert rates.global_rate() == 2
    rates.reset()
    assert rates.total_count == 0


def test_bad_factor() -> None:
    with pytest.raises(ValueError, match="smooth_factor"):
        RateTracker(1.0)

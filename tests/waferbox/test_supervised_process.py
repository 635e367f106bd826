"""A process of a cluster that ends by itself is started again, but not for ever."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from waferbox.cluster import supervised_process
from waferbox.cluster.supervised_process import DELAY_SECONDS, EARLY_EXIT_SECONDS, MAX_EARLY_EXITS, SupervisedProcess
from waferbox.launch.spawn import SpawnError


@dataclass
class FakeProcess:
    pid: int
    host: str = ""
    status: int | None = None
    closed: bool = False

    def fileno(self) -> int:
        raise AssertionError("nobody waits for it")

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.status = 0

    def close(self) -> int:
        self.closed = True
        return self.status or 0


@dataclass
class FakeTime:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Starter:
    """Starts processes with the numbers 1, 2, ... or raises what it is told to."""

    started: list[FakeProcess] = field(default_factory=list)
    error: SpawnError | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __call__(self) -> FakeProcess:
        if self.error is not None:
            raise self.error
        self.started.append(FakeProcess(next(self._numbers)))
        return self.started[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(supervised_process, "time", clock)
    return clock


def test_a_process_that_ends_is_started_again_and_that_is_told(clock: FakeTime) -> None:
    start = Starter()
    wafer = SupervisedProcess("wafer", start)
    assert wafer.restart_if_ended() == []
    for number in range(1, 20):  # however often it happens, if there is some time between
        clock.now += EARLY_EXIT_SECONDS
        start.started[-1].status = -signal.SIGKILL
        (told,) = wafer.restart_if_ended()
        assert told == f"wafer (pid {number}) ended with status -9; started again as pid {number + 1}"
        assert start.started[-2].closed
        assert wafer.process is start.started[-1]
        assert wafer.restart_if_ended() == []
    wafer.close()
    assert start.started[-1].closed


def test_a_process_that_ends_at_once_is_started_later_each_time_and_then_given_up(clock: FakeTime) -> None:
    start = Starter()
    wafer = SupervisedProcess("wafer", start)
    delays = [0.0, *(DELAY_SECONDS * 2**number for number in range(MAX_EARLY_EXITS - 2))]
    for delay in delays:
        start.started[-1].status = 1
        before = len(start.started)
        if delay:
            assert wafer.restart_if_ended() == []
            assert (wafer.process, wafer.restart_at) == (None, clock.now + delay)
            clock.now += delay / 2
            assert wafer.restart_if_ended() == []
            clock.now += delay / 2
        assert [told.partition(";")[2] for told in wafer.restart_if_ended()] == [f" started again as pid {before + 1}"]
    start.started[-1].status = 1
    (told,) = wafer.restart_if_ended()
    assert told.startswith(f"wafer (pid {MAX_EARLY_EXITS}) ended with status 1, {MAX_EARLY_EXITS} times in a row")
    assert told.endswith(": it is not started again")
    assert wafer.given_up
    clock.now += 1000
    assert wafer.restart_if_ended() == []
    assert len(start.started) == MAX_EARLY_EXITS
    assert all(process.closed for process in start.started)
    wafer.close()


def test_one_long_life_makes_up_for_short_ones(clock: FakeTime) -> None:
    start = Starter()
    wafer = SupervisedProcess("wafer", start)
    for number in range(4 * MAX_EARLY_EXITS):
        if number % (MAX_EARLY_EXITS - 1) == 0:
            clock.now += EARLY_EXIT_SECONDS
        start.started[-1].status = 1
        if wafer.restart_if_ended() == []:
            assert wafer.restart_at is not None
            clock.now = wafer.restart_at
            assert wafer.restart_if_ended()
    assert not wafer.given_up


def test_a_process_that_cannot_be_started_is_tried_again_and_then_given_up(clock: FakeTime) -> None:
    start = Starter()
    wafer = SupervisedProcess("wafer", start)
    clock.now += EARLY_EXIT_SECONDS
    start.error = SpawnError("no memory")
    start.started[-1].status = 1
    told: list[str] = []
    for _ in range(3):
        told += wafer.restart_if_ended()
        assert wafer.restart_at is not None
        clock.now = wafer.restart_at
    assert told == []
    start.error = None
    assert wafer.restart_if_ended() == ["wafer could not be started again (no memory); started again as pid 2"]
    start.error = SpawnError("no memory")
    start.started[-1].status = 1
    for _ in range(MAX_EARLY_EXITS):
        told += wafer.restart_if_ended()
        clock.now += 100
    (message,) = told
    assert message.endswith("it is not started again")
    assert wafer.given_up

"""A process of a cluster that ends by itself is started again, but not for ever."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from nodes.launch.spawn import SpawnError
from waferbox.cluster import place
from waferbox.cluster.place import DELAY_SECONDS, MAX_SHORT_LIVES, SHORT_LIFE_SECONDS, Place


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
    monkeypatch.setattr(place, "time", clock)
    return clock


def test_a_process_that_ends_is_started_again_and_that_is_told(clock: FakeTime) -> None:
    start = Starter()
    wafer = Place("wafer", start)
    assert wafer.attend() == []
    for number in range(1, 20):  # however often it happens, if there is some time between
        clock.now += SHORT_LIFE_SECONDS
        start.started[-1].status = -signal.SIGKILL
        (told,) = wafer.attend()
        assert told == f"wafer (pid {number}) ended with status -9; started again as pid {number + 1}"
        assert start.started[-2].closed
        assert wafer.process is start.started[-1]
        assert wafer.attend() == []
    wafer.close()
    assert start.started[-1].closed


def test_a_process_that_ends_at_once_is_started_later_each_time_and_then_given_up(clock: FakeTime) -> None:
    start = Starter()
    wafer = Place("wafer", start)
    delays = [0.0, *(DELAY_SECONDS * 2**number for number in range(MAX_SHORT_LIVES - 2))]
    for delay in delays:
        start.started[-1].status = 1
        before = len(start.started)
        if delay:
            assert wafer.attend() == []
            assert (wafer.process, wafer.restart_at) == (None, clock.now + delay)
            clock.now += delay / 2
            assert wafer.attend() == []
            clock.now += delay / 2
        assert [told.partition(";")[2] for told in wafer.attend()] == [f" started again as pid {before + 1}"]
    start.started[-1].status = 1
    (told,) = wafer.attend()
    assert told.startswith(f"wafer (pid {MAX_SHORT_LIVES}) ended with status 1, {MAX_SHORT_LIVES} times in a row")
    assert told.endswith(": it is not started again")
    assert wafer.given_up
    clock.now += 1000
    assert wafer.attend() == []
    assert len(start.started) == MAX_SHORT_LIVES
    assert all(process.closed for process in start.started)
    wafer.close()


def test_one_long_life_makes_up_for_short_ones(clock: FakeTime) -> None:
    start = Starter()
    wafer = Place("wafer", start)
    for number in range(4 * MAX_SHORT_LIVES):
        if number % (MAX_SHORT_LIVES - 1) == 0:
            clock.now += SHORT_LIFE_SECONDS
        start.started[-1].status = 1
        if wafer.attend() == []:
            assert wafer.restart_at is not None
            clock.now = wafer.restart_at
            assert wafer.attend()
    assert not wafer.given_up


def test_a_process_that_cannot_be_started_is_tried_again_and_then_given_up(clock: FakeTime) -> None:
    start = Starter()
    wafer = Place("wafer", start)
    clock.now += SHORT_LIFE_SECONDS
    start.error = SpawnError("no memory")
    start.started[-1].status = 1
    told: list[str] = []
    for _ in range(3):
        told += wafer.attend()
        assert wafer.restart_at is not None
        clock.now = wafer.restart_at
    assert told == []
    start.error = None
    assert wafer.attend() == ["wafer could not be started again (no memory); started again as pid 2"]
    start.error = SpawnError("no memory")
    start.started[-1].status = 1
    for _ in range(MAX_SHORT_LIVES):
        told += wafer.attend()
        clock.now += 100
    (message,) = told
    assert message.endswith("it is not started again")
    assert wafer.given_up

"""When a client of the vendor's has gone."""

import pytest

from vendor_gateway import presence
from vendor_gateway.presence import BEAT_SECONDS, GONE_SECONDS, IDLE_SECONDS, Presence


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(presence, "time", clock)
    return clock


def limit(client: Presence, clock: Clock, *, has_job: bool = True) -> float:
    """After how many seconds of silence it has gone."""
    begin = clock.now
    while not client.is_gone(has_job=has_job):
        clock.now += 0.5
        assert clock.now < begin + 10_000
    seconds, clock.now = clock.now - begin, begin
    return seconds


def test_a_client_that_has_no_job_may_be_silent_for_long(clock: Clock) -> None:
    client = Presence()
    assert IDLE_SECONDS <= limit(client, clock) <= IDLE_SECONDS + 1


def test_a_client_that_beats_may_miss_some(clock: Clock) -> None:
    client = Presence()
    client.beats("a")
    assert BEAT_SECONDS <= limit(client, clock) <= BEAT_SECONDS + 1
    clock.now += BEAT_SECONDS - 1
    client.note_call()
    assert limit(client, clock) >= BEAT_SECONDS
    client.lease(300)
    assert 300 <= limit(client, clock) <= 301
    client.lease(1 << 30)
    assert limit(client, clock) <= presence.MOST_LEASE_SECONDS + 1


def test_a_client_whose_connection_breaks_is_gone_soon_unless_it_comes_back(clock: Clock) -> None:
    client = Presence()
    client.beats("a")
    client.stream_ended("a")
    assert GONE_SECONDS <= limit(client, clock) <= GONE_SECONDS + 1
    client.beats("a")
    assert limit(client, clock) > GONE_SECONDS + 1


def test_a_job_that_has_ended_is_not_missed(clock: Clock) -> None:
    client = Presence()
    client.beats("compile")
    client.stream_ended("compile")
    client.forget("compile")
    assert limit(client, clock) >= IDLE_SECONDS
    client.stream_ended("compile")  # late
    client.beats("execute")
    assert limit(client, clock) >= BEAT_SECONDS


def test_a_client_that_dies_before_its_first_beat_is_gone_soon(clock: Clock) -> None:
    client = Presence()
    assert limit(client, clock) >= IDLE_SECONDS  # it has not connected yet
    client.opened()
    assert BEAT_SECONDS <= limit(client, clock) <= BEAT_SECONDS + 1
    client.closed()
    assert GONE_SECONDS <= limit(client, clock) <= GONE_SECONDS + 1
    assert limit(client, clock, has_job=False) >= IDLE_SECONDS  # the job has ended before it had beaten
    client.opened()
    client.beats("execute")
    client.named()
    assert BEAT_SECONDS <= limit(client, clock) <= BEAT_SECONDS + 1
    client.stream_ended("execute")
    assert GONE_SECONDS <= limit(client, clock) <= GONE_SECONDS + 1

"""When a client of the vendor's has gone."""

import pytest

from vendor_gateway import presence
from vendor_gateway.presence import Presence
from waferbox import deadlines


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
    assert deadlines.VENDOR_CLIENT.idle <= limit(client, clock) <= deadlines.VENDOR_CLIENT.idle + 1


def test_a_client_that_beats_may_miss_some(clock: Clock) -> None:
    client = Presence()
    client.beats("a")
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    clock.now += deadlines.VENDOR_CLIENT.beat - 1
    client.note_call()
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.beat
    client.lease(300)
    assert 300 <= limit(client, clock) <= 301
    client.lease(1 << 30)
    assert limit(client, clock) <= deadlines.VENDOR_CLIENT.longest_lease + 1


def test_a_client_whose_connection_breaks_is_gone_soon_unless_it_comes_back(clock: Clock) -> None:
    client = Presence()
    client.beats("a")
    client.stream_ended("a")
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1
    client.beats("a")
    assert limit(client, clock) > deadlines.VENDOR_CLIENT.gone + 1


def test_a_job_that_has_ended_is_not_missed(clock: Clock) -> None:
    client = Presence()
    client.beats("compile")
    client.stream_ended("compile")
    client.forget("compile")
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.idle
    client.stream_ended("compile")  # late
    client.beats("execute")
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.beat


def test_a_client_that_dies_before_its_first_beat_is_gone_soon(clock: Clock) -> None:
    client = Presence()
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.idle  # it has not connected yet
    client.opened()
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    client.closed()
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1
    assert limit(client, clock, has_job=False) >= deadlines.VENDOR_CLIENT.idle  # the job has ended before it had beaten
    client.opened()
    client.beats("execute")
    client.named()
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    client.stream_ended("execute")
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1

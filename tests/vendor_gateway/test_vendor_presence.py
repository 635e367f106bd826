"""The silence after which a client of the vendor has timed out."""

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
    """Returns the seconds of silence after which a client has timed out."""
    begin = clock.now
    while not client.has_timed_out(has_job=has_job):
        clock.now += 0.5
        assert clock.now < begin + 10_000
    seconds, clock.now = clock.now - begin, begin
    return seconds


def test_a_client_that_has_no_job_may_be_silent_for_long(clock: Clock) -> None:
    client = Presence()
    assert deadlines.VENDOR_CLIENT.idle <= limit(client, clock) <= deadlines.VENDOR_CLIENT.idle + 1


def test_a_client_that_beats_may_miss_some(clock: Clock) -> None:
    client = Presence()
    client.add_stream("a")
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    clock.now += deadlines.VENDOR_CLIENT.beat - 1
    client.note_call()
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.beat
    client.set_lease(300)
    assert 300 <= limit(client, clock) <= 301
    client.set_lease(1 << 30)
    assert limit(client, clock) <= deadlines.VENDOR_CLIENT.longest_lease + 1


def test_a_client_whose_connection_breaks_is_gone_soon_unless_it_comes_back(clock: Clock) -> None:
    client = Presence()
    client.add_stream("a")
    client.remove_stream("a")
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1
    client.add_stream("a")
    assert limit(client, clock) > deadlines.VENDOR_CLIENT.gone + 1


def test_a_job_that_has_ended_is_not_missed(clock: Clock) -> None:
    client = Presence()
    client.add_stream("compile")
    client.remove_stream("compile")
    client.remove_job("compile")
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.idle
    client.remove_stream("compile")  # late
    client.add_stream("execute")
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.beat


def test_a_client_that_dies_before_its_first_beat_is_gone_soon(clock: Clock) -> None:
    client = Presence()
    assert limit(client, clock) >= deadlines.VENDOR_CLIENT.idle  # it has not connected yet
    client.add_unnamed_stream()
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    client.lose_unnamed_stream()
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1
    assert limit(client, clock, has_job=False) >= deadlines.VENDOR_CLIENT.idle  # the job has ended before it had beaten
    client.add_unnamed_stream()
    client.add_stream("execute")
    client.remove_unnamed_stream()
    assert deadlines.VENDOR_CLIENT.beat <= limit(client, clock) <= deadlines.VENDOR_CLIENT.beat + 1
    client.remove_stream("execute")
    assert deadlines.VENDOR_CLIENT.gone <= limit(client, clock) <= deadlines.VENDOR_CLIENT.gone + 1

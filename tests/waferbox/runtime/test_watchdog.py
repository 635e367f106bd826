"""When an execution is said to hang, and when it only takes its time."""

import types

import pytest

from waferbox import settings
from waferbox.runtime import progress
from waferbox.runtime.progress import Progress, ProgressWatchdog, Usage


class Looks:
    """One look a second at an execution that gets nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.cpu_seconds = 50.0
        self.disk_bytes = 10
        self.progress = Progress("compute")
        self.watchdog = ProgressWatchdog(settings.HANG_SECONDS.default)
        monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def look(self, *, waits: bool = False) -> str:
        usage = Usage(cpu_seconds=self.cpu_seconds, disk_bytes=self.disk_bytes)
        return self.watchdog.hang(self.progress, usage, waits=waits, moved_bytes=7)

    def until_hang(self, *, share: float, disk: int = 0, waits: bool = False) -> tuple[float, str]:
        """Seconds until it is said to hang, and the words; share: of a processor that is used; disk: bytes a second."""
        begin = self.now
        while self.now < begin + 3600:
            if words := self.look(waits=waits):
                return self.now - begin, words
            self.now += 1
            self.cpu_seconds += share
            self.disk_bytes += disk
        return self.now - begin, ""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def test_one_that_does_not_even_compute_is_told_within_30_s(looks: Looks) -> None:
    seconds, words = looks.until_hang(share=0.005)
    assert seconds < 30
    assert "computes nothing" in words


def test_a_long_kernel_on_a_busy_machine_gets_more_time(looks: Looks) -> None:
    seconds, words = looks.until_hang(share=0.05)
    assert 60 < seconds < 65
    assert "more than 60 s" in words


def test_who_waits_for_others_never_hangs(looks: Looks) -> None:
    assert looks.until_hang(share=0.0, waits=True)[1] == ""


def test_a_slow_disk_gets_as_much_time_as_a_kernel(looks: Looks) -> None:
    assert 60 < looks.until_hang(share=0.0, disk=4096)[0] < 65


def test_whatever_comes_of_it_is_progress(looks: Looks) -> None:
    for _ in range(20):
        assert not looks.look()
        looks.now += 15
        looks.progress.step += 1
    for _ in range(20):
        assert not looks.look()
        looks.now += 15
        looks.progress.disk += 0.1


def test_what_this_process_takes_is_counted() -> None:
    before = Usage.now()
    while Usage.now().cpu_seconds == before.cpu_seconds:
        sum(range(10_000))
    assert Usage.now().disk_bytes >= before.disk_bytes

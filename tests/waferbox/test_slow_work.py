"""Reports on work that takes long."""

import threading

import pytest

from waferbox.host import slow_work
from waferbox.host.slow_work import reported

SECONDS = 20.0  # for a thread


def test_the_intervals_grow_and_the_last_one_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []
    reports: list[None] = []
    enough = threading.Event()

    class VirtualEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) < 5:
                return False
            enough.set()
            return super().wait(SECONDS)

    monkeypatch.setattr(slow_work, "Event", VirtualEvent)
    with reported(lambda: reports.append(None)):
        assert enough.wait(SECONDS)
    assert waited == [2.0, 5.0, 10.0, 10.0, 10.0]
    assert len(reports) == 4


def test_without_a_thread_the_begin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of an interpreter, where Python 3.12 starts none any more."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    reports: list[None] = []
    with reported(lambda: reports.append(None)):
        assert len(reports) == 1
    assert len(reports) == 1

"""Threads that tell of their defects."""

import threading

import pytest

from waferbox.host.threads import GuardedThread


@pytest.mark.defects
def test_a_defect_reaches_the_owner() -> None:
    heard: list[Exception] = []

    def work() -> None:
        raise KeyError("a defect")

    thread = GuardedThread(work, name="worker", on_defect=heard.append)
    thread.start()
    thread.join()
    assert [type(error) for error in heard] == [KeyError]


def test_nothing_is_told_of_a_thread_that_ends_well() -> None:
    done = threading.Event()
    thread = GuardedThread(done.set, name="worker", on_defect=lambda error: None)
    thread.start()
    thread.join()
    assert done.is_set()

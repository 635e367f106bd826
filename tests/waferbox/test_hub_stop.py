"""Stopping a hub while another thread closes it: the descriptor of a closed hub may be another file's by then."""

import os
import threading

import pytest

from waferbox.links.hub import Hub


def test_a_hub_that_is_being_closed_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    written: list[int] = []
    stopper = threading.Thread(target=hub.stop)
    close = os.close

    def close_and_let_the_other_thread_run(descriptor: int) -> None:
        close(descriptor)
        if not stopper.ident:
            stopper.start()
            stopper.join(0.1)  # it must wait for the end of close

    monkeypatch.setattr(os, "close", close_and_let_the_other_thread_run)
    monkeypatch.setattr(os, "eventfd_write", lambda descriptor, value: written.append(descriptor))
    hub.close()
    stopper.join()
    assert written == []


def test_a_closed_hub_can_be_stopped_and_closed_again() -> None:
    hub = Hub()
    hub.stop()
    hub.close()
    hub.stop()
    hub.close()

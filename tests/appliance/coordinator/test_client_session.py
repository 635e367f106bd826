"""A coordinator tells the end of its client from the death of the ingress between them."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from appliance.coordinator.session import ClientSession
from waferbox import deadlines
from waferbox.host.threads import GuardedThread


def session_behind(ingress: str) -> ClientSession:
    return ClientSession(lambda message: None, lambda defect: None, 60.0, ingress)


def ended(session: ClientSession, *, is_finished: bool) -> threading.Event:
    """Set when the end of the session has been taken for the client's wish."""
    done = threading.Event()

    def end() -> None:
        session.end(is_finished=is_finished)
        done.set()

    GuardedThread(end, name="end", on_defect=lambda error: None).start()
    return done


@pytest.fixture
def port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address(port: socket.socket) -> str:
    return f"127.0.0.1:{port.getsockname()[1]}"


def test_an_ingress_that_dies_takes_connections_for_a_moment(
    port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = deadlines.COORDINATION.ingress_dying
    # For a busy machine.
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, ingress_dying=dying * 4))
    session = session_behind(address(port))
    done = ended(session, is_finished=False)
    assert not done.wait(dying / 5)
    port.close()  # the last of what the dying process had
    assert not done.wait(dying * 6)  # this process is about to be ended
    session.close()
    assert done.wait(10.0)


def test_the_end_of_a_client_is_one_where_the_ingress_lives(port: socket.socket) -> None:
    with port:
        begin = time.monotonic()
        done = ended(session_behind(address(port)), is_finished=False)
        assert done.wait(10.0)
        assert time.monotonic() - begin >= deadlines.COORDINATION.ingress_dying


def test_a_client_that_has_finished_is_not_waited_for(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = address(port)
    port.close()
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, ingress_dying=60.0))
    assert ended(session_behind(ingress), is_finished=True).wait(10.0)

"""The thread that accepts links: it outlives shortages, waits for no single caller, and does not die unheard."""

import errno
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from link_pairs import connect, listening

from waferbox import deadlines
from waferbox.links import accept_loop
from waferbox.links.handshake import hello
from waferbox.links.link import LinkLost
from waferbox.links.listener import LinkListener

DEADLINE_SECONDS = 20.0


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


def call(listener: LinkListener) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(DEADLINE_SECONDS)
    caller.connect(f"\0{listener.endpoint().socket}")
    return caller


def open_and_close(listener: LinkListener) -> None:
    for end in connect(listener, "socket"):
        end.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED])
def test_an_error_of_accept_that_passes_costs_no_link(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    open_and_close(listener)
    monkeypatch.setattr(accept_loop, "RETRY_SECONDS", 0.02, raising=False)
    accept = socket.socket.accept
    errors = [OSError(number, "for a while")] * 3
    calls = []

    def scarce(self: socket.socket) -> object:
        calls.append(self)
        if errors:
            raise errors.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with caplog.at_level(logging.WARNING):
        open_and_close(listener)
    assert len(calls) == 4  # three errors, and the link: it does not spin
    is_shortage = number != errno.ECONNABORTED
    assert sum("no connection can be accepted" in record.message for record in caplog.records) == is_shortage


def test_callers_who_say_nothing_keep_nobody_waiting(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LINKS", replace(deadlines.LINKS, handshake=3600.0))
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(call(listener))
        open_and_close(listener)


def test_a_caller_who_says_nothing_is_hung_up_on(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LINKS", replace(deadlines.LINKS, handshake=0.05))
    with call(listener) as silent:
        assert silent.recv(100) == b""
    open_and_close(listener)


def test_callers_above_the_limit_wait_until_another_has_gone(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_loop, "MAX_CALLERS", 2)
    first, second, late = (call(listener) for _ in range(3))
    late.sendmsg(hello("token"))
    with pytest.raises(LinkLost):
        listener.expect("token", "late").wait(0.1)
    pending = listener.expect("token", "late")
    first.close()
    pending.wait(DEADLINE_SECONDS).close()
    second.close()
    late.close()


@pytest.mark.defects
def test_a_defect_reaches_those_who_wait_and_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    defect, heard, told = ZeroDivisionError("a defect"), [], threading.Event()

    def fail(hello: bytes) -> str:
        raise defect

    def on_defect(error: Exception) -> None:
        heard.append(error)
        told.set()

    monkeypatch.setattr(accept_loop, "proof_of", fail)
    listener = LinkListener("127.0.0.1:1", on_defect)
    pending = listener.expect("token", "peer")
    with call(listener) as caller:
        caller.sendmsg(hello("token"))
        with pytest.raises(RuntimeError, match="no link from peer can be taken") as raised:
            pending.wait(DEADLINE_SECONDS)
        assert raised.value.__cause__ is defect
    assert told.wait(DEADLINE_SECONDS)
    assert heard == [defect]
    with pytest.raises(RuntimeError, match="no link from later"):
        listener.expect("another", "later").wait(DEADLINE_SECONDS)
    listener.close()

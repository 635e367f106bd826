"""A management address at which somebody else listens, or nobody."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from cstorch._internal.session.connecting import connect
from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_server


@contextmanager
def nobody() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@contextmanager
def a_web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def a_stopped_process() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def another_role() -> Iterator[str]:
    server = make_server()
    address = bind(server, "127.0.0.1:0")
    server.start()
    yield address
    server.stop(None).wait(5)


@pytest.mark.parametrize(
    ("who", "text"),
    [
        (nobody, r"no management service answers at {} within 0.5 s: check the address, and that the cluster is up"),
        (a_web_server, r"what listens at {} does not answer as a management service does: check the port"),
        (a_stopped_process, r"what listens at {} does not answer as a management service does: check the port"),
        (another_role, r"what listens at {} is no management service, but perhaps another process of the cluster"),
    ],
)
def test_a_wrong_port_is_told_by_who_is_there(who: object, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.5, silent=0.5))
    with who() as address, pytest.raises(ClusterUnreachableError, match=text.format(address)):  # type: ignore[operator]
        ClientJob(address, ClusterConfig(), "")


def test_a_process_that_is_silent_for_a_while_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a management service that is stopped, or busy."""
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.5))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        connected: list[grpc.Channel] = []
        thread = threading.Thread(
            target=lambda: connected.append(connect(address, "management service", "", silent_seconds=30.0))
        )
        with caplog.at_level("INFO", "cstorch.cluster"):
            thread.start()
            while "does not answer: waiting up to 30 s" not in caplog.text:
                thread.join(0.05)
                assert thread.is_alive()
        stopped.close()
        server = make_server()
        assert server.add_insecure_port(address)
        server.start()
        thread.join(25.0)
        server.stop(None).wait(5)
    (channel,) = connected
    channel.close()

"""Servers at default ports: where one is taken, the next is used."""

import errno
import os
import socket
from collections.abc import Callable

import pytest

from appliance.page.server import PageServer
from waferbox.rpc.address import MAX_TAKEN_PORTS, bind, listen
from waferbox.rpc.server import make_server


def test_the_next_free_port_is_used() -> None:
    tried: list[str] = []

    def use(address: str) -> str:
        tried.append(address)
        if len(tried) < 3:
            raise OSError("taken")
        return address

    assert listen(use, "127.0.0.1:9000", next_free=True) == "127.0.0.1:9002"
    assert tried == [f"127.0.0.1:{port}" for port in (9000, 9001, 9002)]
    tried.clear()
    with pytest.raises(OSError, match="taken"):
        listen(use, "127.0.0.1:9000", next_free=False)


@pytest.mark.parametrize("first", [9000, 65530])
def test_it_gives_up_at_some_port(first: int) -> None:
    tried: list[str] = []

    def use(address: str) -> None:
        tried.append(address)
        raise OSError(f"cannot listen at {address}")

    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{first}$"):
        listen(use, f"127.0.0.1:{first}", next_free=True)
    assert len(set(tried)) == min(MAX_TAKEN_PORTS, 65535 - first)


def test_the_reason_is_told() -> None:
    with pytest.raises(OSError, match=r"at 192\.0\.2\.1:0: Cannot assign requested address$"):
        bind(make_server(), "192.0.2.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"at {address}: Address already in use; port 0 is any free one"):
            bind(make_server(), address)


@pytest.mark.parametrize(
    ("method", "number"), [("connect", errno.ENETUNREACH), ("bind", errno.EADDRNOTAVAIL)], ids=["down", "no address"]
)
def test_a_missing_loopback_interface_is_named(monkeypatch: pytest.MonkeyPatch, method: str, number: int) -> None:
    class Socket(socket.socket):
        pass

    def refuse(self: Socket, address: tuple[str, int]) -> None:
        raise OSError(number, os.strerror(number))

    setattr(Socket, method, refuse)
    monkeypatch.setattr(socket, "socket", Socket)
    remedy = r"the loopback interface must be up, with 127\.0\.0\.1 \(`ip link set lo up`\)$"
    with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1:0: {os.strerror(number)}: {remedy}"):
        bind(make_server(), "127.0.0.1:0")


def grpc_port(address: str) -> str:
    return bind(make_server(), address)


def page_port(address: str) -> str:
    server = PageServer(address)
    server.close()
    return server.address


@pytest.mark.parametrize("use", [grpc_port, page_port])
def test_servers_notice_that_a_port_is_taken(use: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen(use, f"127.0.0.1:{port}", next_free=False)
        host, _, found = listen(use, f"127.0.0.1:{port}", next_free=True).rpartition(":")
    assert host == "127.0.0.1"
    assert port < int(found) <= port + MAX_TAKEN_PORTS

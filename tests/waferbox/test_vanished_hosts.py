"""Connections to hosts that vanish are ended; those to suspended processes, and to this host, stay."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from benchmarks.network import Host, NoNetwork, hosts
from waferbox.rpc.vanished_hosts import end_connections

SECONDS = 3.0
LONG = 60.0

SERVER = textwrap.dedent(
    f"""
    import select, socket, time
    from waferbox.rpc.vanished_hosts import end_connections

    with socket.create_server(("", 7000)) as listener:
        print("listens", flush=True)
        connections = [listener.accept()[0] for _ in range(2)]
        names = {{each.fileno(): each.recv(100).decode() for each in connections}}
        print("connected", flush=True)
        while True:
            end_connections(7000, {SECONDS})
            for each in select.select(connections, [], [], 0.2)[0]:
                try:
                    received = each.recv(100).decode()
                except OSError:
                    received = ""
                print(names[each.fileno()], received or "ended", flush=True)
                if not received:
                    connections.remove(each)
    """
)
CLIENT = textwrap.dedent(
    """
    import socket, sys

    with socket.create_connection((sys.argv[1], 7000)) as connection:
        connection.sendall(sys.argv[2].encode())
        for line in sys.stdin:
            connection.sendall(line.strip().encode())
    """
)


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    try:
        with hosts(3, "1gbit") as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))


def python(host: Host, *words: str) -> subprocess.Popen[str]:
    command = host.command(sys.executable, "-c", *words)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def test_the_connection_to_a_host_that_vanished_is_ended_and_that_to_a_suspended_process_stays(
    three_hosts: list[Host],
) -> None:
    first, second, third = three_hosts
    with python(first, SERVER) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        with (
            python(second, CLIENT, first.address, "suspended") as suspended,
            python(third, CLIENT, first.address, "vanished") as vanished,
        ):
            try:
                assert server.stdout.readline() == "connected\n"
                suspended.send_signal(signal.SIGSTOP)
                third.cut_off()
                begin = time.monotonic()
                assert server.stdout.readline() == "vanished ended\n"
                assert SECONDS / 2 < time.monotonic() - begin < LONG
                time.sleep(2 * SECONDS)  # in which nothing may happen to the other connection
                suspended.send_signal(signal.SIGCONT)
                assert suspended.stdin is not None
                suspended.stdin.write("answers\n")
                assert server.stdout.readline() == "suspended answers\n"
            finally:
                for process in (suspended, vanished, server):
                    process.kill()


def test_only_connections_to_the_port_are_looked_at() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(listener.getsockname()) as client,
        socket.create_connection(other.getsockname()) as stranger,
        listener.accept()[0] as accepted,
        other.accept()[0] as accepted_stranger,
    ):
        port = listener.getsockname()[1]
        end_connections(port, LONG)
        probed = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for each in (accepted, accepted_stranger, client, stranger, listener)
        ]
        assert probed == [1, 0, 0, 0, 0]
        end_connections(port, -1.0)  # any time since the last acknowledgement is too long
        assert client.recv(1) == b""
        stranger.sendall(b"1")
        assert accepted_stranger.recv(1) == b"1"

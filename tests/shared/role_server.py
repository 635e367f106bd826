"""A process that has imported what fork servers import, and forks for each process of a cluster that tests start.

A forked process is what `python -m MODULE` is, but for one thing: a fork server that it starts is forked too, from a
process that comes with it and has not done anything yet.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forking_server import (
    MAX_BYTES,
    MAX_FDS,
    ForkedProcess,
    ForkingServer,
    end_after,
    replace_environment,
    serve,
    take_descriptors,
)

from waferbox.host.descriptors import readable
from waferbox.launch import fork_server, fork_server_process

CLONE_NEWNET = 0x40000000


class RoleServer(ForkingServer):
    """Owns the process, which ends when this object is closed, or with this process."""

    def __init__(self, temporary: Path) -> None:
        """temporary: a folder for what torch leaves behind."""
        super().__init__(Path(__file__), temporary)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        output: int,
        fds: Mapping[int, int] | None = None,
        namespace: str = "",
    ) -> ForkedProcess:
        """Starts `python -m module arguments`.

        Args:
            module: the module.
            arguments: its arguments.
            variables: its environment.
            output: the descriptor of its standard output and error.
            fds: its other descriptors by number, among which may be 0 and 1, and what they are here.
            namespace: of the network; empty: that of this process.
        """
        with open(os.devnull, "rb") as nothing:
            all_fds = {0: nothing.fileno(), 1: output, 2: output, **(fds or {})}
            return self.fork([namespace, module, *arguments], Path.cwd(), variables, all_fds)


class _ForkServer:
    """As subprocess.Popen, of a fork server that this process has forked before it did anything else."""

    def __init__(self) -> None:
        self._request, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._request.close()
                status = _become_fork_server(theirs)
            finally:
                os._exit(status)
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._returncode: int | None = None

    def begin(self, command: Sequence[str], variables: Mapping[str, str], output: int, fds: Sequence[int]) -> None:
        """Makes it what the command would be.

        fds: the descriptors that the command names.
        """
        words = command[command.index(fork_server.__name__) :]
        request = {"words": words, "fds": list(fds), "variables": dict(variables)}
        reader, writer = os.pipe()
        self.stdin = open(writer, "wb", buffering=0)  # noqa: SIM115 - closed by whoever ends the fork server
        socket.send_fds(self._request, [json.dumps(request).encode()], [reader, output, output, *fds])
        os.close(reader)
        self._request.close()

    def poll(self) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None and not readable([self._pidfd], timeout):
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_fork_server(requests: socket.socket) -> int:
    os.setsid()
    message, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, MAX_FDS)
    requests.close()
    if not message:
        return 0  # the process has ended, or needs no fork server
    take_descriptors(fds[:3], range(3))
    request = json.loads(message)
    replace_environment(request["variables"])
    moved = dict(zip(map(str, request["fds"]), map(str, fds[3:]), strict=True))
    sys.argv = [moved.get(word, word) for word in request["words"]]
    return fork_server.main()


def _prepare_fork_server() -> None:
    """Has the first fork server of this process be a forked one. One that takes its place is a Python of its own."""
    prepared = [_ForkServer()]

    def start(
        command: Sequence[str], *, env: Mapping[str, str], stdout: int, pass_fds: Sequence[int], **others: object
    ) -> "_ForkServer | subprocess.Popen[bytes]":
        if not prepared:
            return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **others)  # type: ignore[call-overload]
        process = prepared.pop()
        process.begin(command, env, stdout, pass_fds)
        return process

    module: Any = fork_server_process
    module.subprocess = types.SimpleNamespace(
        Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


def enter_namespace(name: str) -> None:
    """Has this process in a network namespace, as `ip netns exec` has a command."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def main() -> None:
    """The server; and the forked process, in which this ends as `python -m MODULE` does."""
    fork_server.preload(fork_server_process.COORDINATOR_PRELOAD)
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = os.getcwd()
    if namespace := sys.argv.pop(0):
        enter_namespace(namespace)
    _prepare_fork_server()
    end_after(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()

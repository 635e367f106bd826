"""Starting processes of the cluster: by the fork server where one runs, else as a Python of their own.

The fork server has torch imported, so a process that it forks is there in milliseconds. It is found by the environment
variable WAFERBOX_FORK_SERVER, the name of its abstract Unix socket. Every process started here lives at most as long as
the process that asked for it and holds its Child; or, if it was asked for as one that outlives it, as the fork server.
"""

import concurrent.futures
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from nodes.launch.descriptors import readable
from nodes.launch.process import MODULES

SOCKET_VARIABLE = "WAFERBOX_FORK_SERVER"
MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 16
START_DEADLINE_SECONDS = 60.0  # torch may have to come from a cold disk first
CLOSE_DEADLINE_SECONDS = 8.0  # more than the fork server gives its children

__all__ = ["MODULES", "Child", "ForkServerProcess", "SpawnError", "spawn", "spawn_python"]


class SpawnError(RuntimeError):
    """A process could not be started."""


class _Ending(Protocol):
    """How the exit status of a process that has ended is learnt."""

    def status(self) -> int: ...
    def close(self) -> None: ...


class Child:
    """A process that this one asked for. close() ends it, if it still runs. Thread-safe, but close is the last."""

    def __init__(self, module: str, pid: int, pidfd: int, ending: _Ending) -> None:
        self.module = module
        self.pid = pid
        self._pidfd = pidfd
        self._ending = ending
        self._status: int | None = None
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit status as subprocess has it (-9: killed by signal 9), or None while the process runs."""
        try:
            return self.wait(0.0)
        except TimeoutError:
            return None

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Raises TimeoutError when the process does not end in time."""
        if self._status is None:
            if not readable([self._pidfd], timeout_seconds):
                raise TimeoutError(f"{self.module} (pid {self.pid}) still runs after {timeout_seconds} s")
            with self._lock:
                if self._status is None:
                    self._status = self._ending.status()
        return self._status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self, deadline_seconds: float = 3.0) -> int:
        """End the process, kindly and then not, and forget it. Returns its exit status."""
        try:
            self.terminate()
            try:
                return self.wait(deadline_seconds)
            except TimeoutError:
                self.kill()
                return self.wait()
        finally:
            if self._pidfd >= 0:
                self._ending.close()
                os.close(self._pidfd)
                self._pidfd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def spawn(module: str, argv: Sequence[str], fds: Sequence[int] = (), *, outlives: bool = False) -> Child:
    """Start main(argv) of one of MODULES in a process of its own. Raises SpawnError.

    The descriptors are 3, 4, ... in the new process, in the order given here, where they stay open too. Its standard
    input is empty; standard output and error are the fork server's, or else this process's. It ignores the terminal:
    its end is the Child's close, or the end of this process. With outlives it survives this process and ends by itself,
    or with the fork server.
    """
    if module not in MODULES:
        raise ValueError(f"{module!r} is not one of the modules that may be started: {', '.join(sorted(MODULES))}")
    name = os.environ.get(SOCKET_VARIABLE)
    if name:
        return _spawn_forked(name, module, argv, fds, outlives=outlives)
    return spawn_python(module, argv, fds, outlives=outlives)


# --- by the fork server -----------------------------------------------------------------------------------------------


class _Connection:
    """The socket to the fork server on which one process was asked for: carries its exit status in the end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def status(self) -> int:
        try:
            answer = self._channel.recv(MAX_MESSAGE_BYTES)
        except OSError:
            answer = b""
        return int(json.loads(answer)["status"]) if answer else -signal.SIGKILL  # the fork server took it along

    def close(self) -> None:
        self._channel.close()


def _spawn_forked(name: str, module: str, argv: Sequence[str], fds: Sequence[int], *, outlives: bool) -> Child:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.settimeout(START_DEADLINE_SECONDS)
        channel.connect(f"\0{name}")
        request = json.dumps({"module": module, "argv": list(argv), "outlives": outlives}).encode()
        if len(request) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise SpawnError(f"{module}: too many arguments or descriptors for one process")
        socket.send_fds(channel, [request], list(fds))
        answer, received, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
    except OSError as error:
        channel.close()
        raise SpawnError(
            f"the fork server does not answer ({error}); is the launcher that started it still there?"
        ) from error
    except SpawnError:
        channel.close()
        raise
    channel.settimeout(None)
    if not answer or not received:
        channel.close()
        raise SpawnError("the fork server ended, or refused: " + (answer.decode() or "see its messages"))
    return Child(module, int(json.loads(answer)["pid"]), received[0], _Connection(channel))


# --- as a Python of its own -------------------------------------------------------------------------------------------

# PR_SET_PDEATHSIG follows the thread that started a process: one thread that lives as long as this process starts all.
_starter = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawn")


class _Popen:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def status(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Nothing but the process, which has ended."""


def spawn_python(module: str, argv: Sequence[str], fds: Sequence[int] = (), *, outlives: bool = False) -> Child:
    """As spawn, but never by the fork server: for what needs no torch, while the fork server still imports it."""
    command = [sys.executable, "-P", "-m", "nodes.launch.process"]
    command += [] if outlives else ["--parent", str(os.getpid())]
    command += ["--fds", ",".join(map(str, fds)), module, *argv]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)

    try:
        process = _starter.submit(start).result()
    except OSError as error:
        raise SpawnError(f"{module} could not be started: {error}") from error
    return Child(module, process.pid, os.pidfd_open(process.pid), _Popen(process))


# --- the fork server itself -------------------------------------------------------------------------------------------


class ForkServerProcess:
    """Owns a fork server, which ends, with all that it forked, when this object is closed or its process dies."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], output: int = 2) -> None:
        """Start it, without waiting for its imports: processes can be asked for at once.

        preload: modules for it to import, none of which may import grpc. output: the descriptor for what it and its
        children print: standard error, because standard output may be a pipe that somebody reads to its end.
        """
        self.name = f"waferbox-{secrets.token_hex(12)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{self.name}")
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nodes.launch.fork_server", str(listener.fileno()), *preload],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                env={**environment, SOCKET_VARIABLE: self.name},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status of the fork server, or None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End it and everything that it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

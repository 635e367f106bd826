"""Starting processes of the cluster, by the fork server or as a Python of their own; and their ends."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from waferbox import deadlines, settings
from waferbox.host.descriptors import readable
from waferbox.launch.fork_server_process import own_fork_server_name, own_is_ending
from waferbox.launch.installation import python_command
from waferbox.launch.process import MODULES
from waferbox.security.tokens import without_tokens

# --- A process that this one asked for: its end, its exit status, and how to bring that end about ---------------------


MAX_STATUS_BYTES = 1024


class ExitStatus(Protocol):
    """How the exit status of a process that has ended is learnt."""

    cause: str  # what ended it with itself, once the status is known; empty: nothing did

    def read(self) -> int: ...
    def close(self) -> None: ...


class PopenStatus:
    """Of a child of this process."""

    cause = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Nothing but the process, which has ended."""


class ForkServerStatus:
    """Of a child of the fork server, which sends it on the connection that asked for the process."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int, server_pid: int) -> None:
        self.cause = ""
        self._server_pid = server_pid
        self._connection = connection
        self._pid = pid
        self._pidfd = pidfd

    def read(self) -> int:
        if not readable([self._connection], 0.0):
            # The fork server may be suspended: the kernel knows as well.
            status = zombie_status(self._pid, self._pidfd)
            if status is not None:
                return status
        answer = b""
        with contextlib.suppress(OSError):
            self._connection.settimeout(deadlines.FORK_SERVER.status)
            answer = self._connection.recv(MAX_STATUS_BYTES)
        if answer:
            return int(json.loads(answer)["status"])
        self.cause = f"the fork server (pid {self._server_pid}), which had started it, died"
        return -signal.SIGKILL

    def close(self) -> None:
        self._connection.close()


class UnknownStatus:
    """Of a process that neither this one nor its fork server had started: nobody passes it on."""

    def __init__(self, pid: int) -> None:
        self.cause = ""
        self._pid = pid

    def read(self) -> int:
        self.cause = f"its process (pid {self._pid}) ended"
        return 1

    def close(self) -> None:
        """Nothing but the process, which has ended."""


def process_started(pid: int) -> int:
    """When a process was started, in clock ticks since the boot. Raises ProcessLookupError."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def zombie_status(pid: int, pidfd: int) -> int | None:
    """The exit status of a process that has ended and that its parent has not waited for; else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        waited_for = "Pid:\t-1\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] != "Z" or waited_for:  # after that the number may be another's
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))


class Child:
    """A process that this one asked for. close() ends it, if it still runs. Thread-safe, but close is the last."""

    host = ""  # this one

    def __init__(self, module: str, pid: int, pidfd: int, exit_status: ExitStatus) -> None:
        self.module = module
        self.pid = pid
        self._pidfd = pidfd
        self._exit_status = exit_status
        self._status: int | None = None
        self._lock = threading.Lock()

    @classmethod
    def find(cls, module: str, pid: int, started: int) -> "Child | None":
        """A process that another one had asked for, and that was started then; None if it has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(ProcessLookupError):
            if process_started(pid) == started:  # else the number is another's by now
                return cls(module, pid, pidfd, UnknownStatus(pid))
        os.close(pidfd)
        return None

    @property
    def cause(self) -> str:
        """What ended it, once wait has returned, where it ended with another process; else empty."""
        return self._exit_status.cause

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
                    self._status = self._exit_status.read()
        return self._status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self, deadline_seconds: float = 3.0) -> int:
        """End the process, by SIGTERM and after the deadline by SIGKILL, and forget it. Returns its exit status."""
        try:
            self.terminate()
            try:
                return self.wait(deadline_seconds)
            except TimeoutError:
                self.kill()
                return self.wait()
        finally:
            if self._pidfd >= 0:
                self._exit_status.close()
                os.close(self._pidfd)
                self._pidfd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


# --- Starting processes of the cluster: by the fork server where one runs, else as a Python of their own --------------
#
# The fork server has torch imported, so a process that it forks is there in milliseconds. It is this process's own
# (`waferbox.launch.fork_server_process`), or the launcher's, which the environment variable WAFERBOX_FORK_SERVER
# names. Every
# process started here lives at most as long as the process that asked for it and holds its Child; or, if it was asked
# for
# as one that outlives it, as the fork server.


MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 16


class SpawnError(RuntimeError):
    """A process could not be started."""


def spawn(module: str, argv: Sequence[str], fds: Sequence[int] = (), *, outlives: bool = False) -> Child:
    """Start main(argv) of one of MODULES in a process of its own. Raises SpawnError.

    The descriptors are 3, 4, ... in the new process, in the order given here, where they stay open too. Its standard
    input is empty; standard output and error are the fork server's, or else this process's. It ignores the terminal:
    its end is the Child's close, or the end of this process. With outlives it survives this process and ends by itself,
    or with the fork server.
    """
    if module not in MODULES:
        raise ValueError(f"{module!r} is not one of the modules that may be started: {', '.join(sorted(MODULES))}")
    name = _fork_server_name()
    if not name:
        return spawn_python(module, argv, fds, outlives=outlives)
    try:
        return _spawn_forked(name, module, argv, fds, outlives=outlives)
    except SpawnError:
        if not own_is_ending():
            raise
    return _spawn_forked(_fork_server_name(), module, argv, fds, outlives=outlives)


# --- by the fork server -----------------------------------------------------------------------------------------------


def _fork_server_name() -> str:
    try:
        return own_fork_server_name() or settings.FORK_SERVER.get()
    except OSError as error:
        raise SpawnError(f"a fork server could not be started in place of the one that ended: {error}") from error


def _spawn_forked(name: str, module: str, argv: Sequence[str], fds: Sequence[int], *, outlives: bool) -> Child:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(deadlines.FORK_SERVER.start)
        connection.connect(f"\0{name}")
        request = json.dumps({"module": module, "argv": list(argv), "outlives": outlives}).encode()
        if len(request) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise SpawnError(f"{module}: too many arguments or descriptors for one process")
        socket.send_fds(connection, [request], list(fds))
        answer, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    except OSError as error:
        connection.close()
        raise SpawnError(
            f"the fork server does not answer ({error}); if a launcher started it, that must still be there"
        ) from error
    except SpawnError:
        connection.close()
        raise
    if not answer or not received:
        connection.close()
        raise SpawnError("the fork server ended, or refused: " + (answer.decode() or "see its messages"))
    started, pidfd = json.loads(answer), received[0]
    pid = int(started["pid"])
    return Child(module, pid, pidfd, ForkServerStatus(connection, pid, pidfd, int(started["server"])))


# --- as a Python of its own -------------------------------------------------------------------------------------------

# PR_SET_PDEATHSIG follows the thread that started a process: one thread that lives as long as this process starts all.
_starter = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawn")


def spawn_python(module: str, argv: Sequence[str], fds: Sequence[int] = (), *, outlives: bool = False) -> Child:
    """As spawn, but never by the fork server: for what needs no torch, while the fork server still imports it."""
    command = python_command("waferbox.launch.process")
    command += [] if outlives else ["--parent", str(os.getpid())]
    command += ["--fds", ",".join(map(str, fds)), module, *argv]

    environment = without_tokens(os.environ)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, start_new_session=True
        )

    try:
        process = _starter.submit(start).result()
    except OSError as error:
        raise SpawnError(f"{module} could not be started: {error}") from error
    return Child(module, process.pid, os.pidfd_open(process.pid), PopenStatus(process))

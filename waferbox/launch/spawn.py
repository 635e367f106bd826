"""Starting processes of the cluster, by the fork server or as a Python of their own, and observing their ends.

The fork server has torch imported, so that it forks a process within milliseconds. It is this process's own
(`waferbox.launch.fork_server_process`), or the launcher's, which the variable WAFERBOX_FORK_SERVER names. A process
lives at most as long as the process that holds its Child; or, if it was requested with `outlives`, as the fork server.
"""

import concurrent.futures
import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from waferbox import deadlines, settings
from waferbox.host.descriptors import readable
from waferbox.host.process_limits import failed_start
from waferbox.launch.fork_server_process import own_fork_server_name, own_is_ending
from waferbox.launch.installation import python_command
from waferbox.launch.process import MODULES
from waferbox.security.tokens import without_tokens

# --- A started process ------------------------------------------------------------------------------------------------


MAX_STATUS_BYTES = 1024
_PF_EXITING = 0x4  # of Linux: the process is ending


class ExitStatus(Protocol):
    """A source of the exit status of a process that has ended."""

    cause: str  # the end of another process that has ended this one, once the status is read; empty: there is none

    def read(self) -> int: ...
    def close(self) -> None: ...


class PopenStatus:
    """The exit status of a child of this process."""

    cause = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Does nothing: there is no connection to close."""


class ForkServerStatus:
    """The exit status of a child of the fork server, which sends it over the connection of the request."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int, server_pid: int) -> None:
        self.cause = ""
        self._server_pid = server_pid
        self._connection = connection
        self._pid = pid
        self._pidfd = pidfd

    def read(self) -> int:
        if not readable([self._connection], 0.0):
            # The fork server may be suspended; the kernel has the status too.
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
    """The unknown exit status of a process that neither this process nor its fork server has started."""

    def __init__(self, pid: int) -> None:
        self.cause = ""
        self._pid = pid

    def read(self) -> int:
        self.cause = f"its process (pid {self._pid}) ended"
        return 1

    def close(self) -> None:
        """Does nothing: there is no connection to close."""


def process_started(pid: int) -> int:
    """The start time of a process, in clock ticks since the boot. Raises ProcessLookupError."""
    return int(_stat_fields(pid)[19])


def is_running(pid: int, started: int) -> bool:
    """Whether a process runs, and is neither a zombie nor about to be one, with its connections closed already.

    started: its time, by process_started, as an id may be used again.
    """
    try:
        fields = _stat_fields(pid)
    except ProcessLookupError:
        return False
    return int(fields[19]) == started and fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, the state. Raises ProcessLookupError."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def zombie_status(pid: int, pidfd: int) -> int | None:
    """The exit status of a process that has ended and for which its parent has not waited; else None."""
    try:
        fields = _stat_fields(pid)
        waited_for = "Pid:\t-1\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] != "Z" or waited_for:  # a process that was waited for has freed its id for another
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))


class Child:
    """A process that this process has requested; `close` ends it. Thread-safe, but `close` is the last call."""

    host = ""  # this host

    def __init__(self, module: str, pid: int, pidfd: int, exit_status: ExitStatus) -> None:
        self.module = module
        self.pid = pid
        self._pidfd = pidfd
        self._exit_status = exit_status
        self._status: int | None = None
        self._lock = threading.Lock()

    @classmethod
    def find(cls, module: str, pid: int, started: int) -> "Child | None":
        """A process that another process has requested; None if it has ended. started: its time, by process_started."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(ProcessLookupError):
            if process_started(pid) == started:  # otherwise the id belongs to a later process
                return cls(module, pid, pidfd, UnknownStatus(pid))
        os.close(pidfd)
        return None

    @property
    def cause(self) -> str:
        """The end of another process that has ended this one, once `wait` has returned; empty if there is none."""
        return self._exit_status.cause

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit status, -9 for a process killed by signal 9; None while the process runs."""
        try:
            return self.wait(0.0)
        except TimeoutError:
            return None

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits for the end and returns the exit status. Raises TimeoutError if the process does not end in time."""
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
        """Ends the process, by SIGTERM and after the deadline by SIGKILL, and returns its exit status."""
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


# --- Starting a process -----------------------------------------------------------------------------------------------


MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 16


class SpawnError(RuntimeError):
    """Raised where a process cannot be started."""


class ForkServerLost(SpawnError):
    """Raised where the fork server of a launcher does not answer, which the launcher restarts if it has ended."""


def spawn(
    module: str,
    argv: Sequence[str],
    fds: Sequence[int] = (),
    *,
    outlives: bool = False,
    end_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """Starts main(argv) of one of MODULES in a new process, by the fork server or else as a Python of its own.

    The new process is in a session of its own, so that no terminal ends it. Its standard input is empty; its standard
    output and error are those of the fork server, or of this process.

    Args:
        module: one of MODULES.
        argv: arguments of its main.
        fds: descriptors that are 3, 4, ... in the new process; they stay open here.
        outlives: whether it survives this process. It then ends by itself or with the fork server.
        end_signal: of the fork server, when it ends itself.

    Raises:
        SpawnError: it cannot be started.
    """
    if module not in MODULES:
        raise ValueError(f"{module!r} is not one of the modules that may be started: {', '.join(sorted(MODULES))}")
    name = _fork_server_name()
    if not name:
        return spawn_python(module, argv, fds, outlives=outlives)
    try:
        return _spawn_forked(name, module, argv, fds, outlives=outlives, end_signal=end_signal)
    except SpawnError:
        if not own_is_ending():
            raise
    return _spawn_forked(_fork_server_name(), module, argv, fds, outlives=outlives, end_signal=end_signal)


def _fork_server_name() -> str:
    try:
        return own_fork_server_name() or settings.FORK_SERVER.get()
    except OSError as error:
        raise SpawnError(f"a fork server could not be started in place of the one that ended: {error}") from error


def _spawn_forked(
    name: str, module: str, argv: Sequence[str], fds: Sequence[int], *, outlives: bool, end_signal: signal.Signals
) -> Child:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Rather than settimeout, with which a server that has many requests before this one seems not to be there.
        limit = struct.pack("ll", math.ceil(deadlines.FORK_SERVER.start), 0)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, limit)
        connection.connect(f"\0{name}")
        wanted = {"module": module, "argv": list(argv), "outlives": outlives, "end_signal": end_signal}
        request = json.dumps(wanted).encode()
        if len(request) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise SpawnError(f"{module}: too many arguments or descriptors for one process")
        socket.send_fds(connection, [request], list(fds))
        answer, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    except OSError as error:
        connection.close()
        raise ForkServerLost(
            f"the fork server does not answer ({error}); if a launcher started it, that must still be there"
        ) from error
    except SpawnError:
        connection.close()
        raise
    if not answer or not received:
        connection.close()
        if not answer:
            raise ForkServerLost("the fork server ended; see its messages")
        raise SpawnError("the fork server refused: " + answer.decode())
    started, pidfd = json.loads(answer), received[0]
    pid = int(started["pid"])
    return Child(module, pid, pidfd, ForkServerStatus(connection, pid, pidfd, int(started["server"])))


# PR_SET_PDEATHSIG is sent at the end of the thread that has started a process: so one thread, which lives as long as
# this process, starts all.
_starter = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawn")


def spawn_python(module: str, argv: Sequence[str], fds: Sequence[int] = (), *, outlives: bool = False) -> Child:
    """Starts a process as `spawn` does, but never by the fork server, whose import of torch not all processes need."""
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
        raise SpawnError(f"{module} could not be started: {failed_start(error)}") from error
    return Child(module, process.pid, os.pidfd_open(process.pid), PopenStatus(process))

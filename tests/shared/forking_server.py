"""A process that has modules imported and forks for others, so that each of these is spared the imports.

The tests start hundreds of Pythons, and most of these take longer to import torch than to do what they are there for.
"""

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from waferbox.host.descriptors import readable

MAX_BYTES = 1 << 17
MAX_FDS = 8
START_SECONDS = 60.0  # for a busy machine
# The processes of a test are found by this variable of their environment. Its value always has as many characters.
MARK = "WAFERBOX_TEST_MARK"
NO_MARK = "0" * 16


class ForkedProcess:
    """As subprocess.Popen, of a process that the server forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        connection.settimeout(START_SECONDS)
        self.pid = int(connection.recv(MAX_BYTES))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not readable([self._connection], timeout):
                raise subprocess.TimeoutExpired("the forked process", timeout or 0.0)
            self.returncode = int(self._connection.recv(MAX_BYTES))
            self._connection.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkingServer:
    """Owns the process, which ends when this object is closed, or with this process."""

    def __init__(self, program: Path, temporary: Path) -> None:
        """program: what the process runs, which calls `serve`. temporary: a folder for what torch leaves behind."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # libgomp must not spin where processes outnumber the cores, and reads its policy when torch is imported.
        variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", MARK: NO_MARK}
        folders = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **variables, **folders},
                start_new_session=True,
            )

    def fork(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], fds: Mapping[int, int]
    ) -> ForkedProcess:
        """Starts a process in a session of its own.

        Args:
            words: its sys.argv.
            folder: its working directory.
            variables: its environment.
            fds: its descriptors by number, which begin with 0, 1 and 2, and what they are here.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"words": list(words), "folder": str(folder), "variables": dict(variables), "fds": list(fds)}
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno(), *fds.values()])
        return ForkedProcess(mine)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(START_SECONDS)


def serve(requests: socket.socket) -> None:
    """Serves until nobody can ask any more, and then exits; returns in each forked process, which has its sys.argv."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the forked ones
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, MAX_FDS)
        if not request:
            sys.exit(0)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    with socket.socket(fileno=fds.pop(0)) as connection:
        forked = os.fork()
        if forked != 0:
            for fd in fds:
                os.close(fd)
            connection.send(str(forked).encode())
            status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
            with contextlib.suppress(OSError):  # whoever asked has ended
                connection.send(str(status).encode())
            os._exit(0)
    os.setsid()
    asked = json.loads(request)
    take_descriptors(fds, asked["fds"])
    os.chdir(asked["folder"])
    replace_environment(asked["variables"])
    sys.argv = asked["words"]


def end_after(program: Callable[[], object]) -> NoReturn:
    """Runs the program and ends this forked process as Python ends, but without taking its modules apart.

    That writes to pages that are shared with the server, and would take longer than many a process of the tests runs.
    """
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - printed, as Python does
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    private: Any = threading
    private._shutdown()  # waits for threads that are not daemons, as Python does before the functions of atexit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the program closed it
            stream.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def take_descriptors(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Moves descriptors to these numbers."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max(numbers)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(numbers, aside, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Replaces the environment of this process, and the mark in the memory that the kernel shows as its environment."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARK.encode())
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # it was that of the server
    mark = variables.get(MARK, NO_MARK).encode()
    assert len(mark) == len(NO_MARK)
    ctypes.memmove(place, mark, len(mark))

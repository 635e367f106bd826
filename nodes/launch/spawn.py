"""Starting processes of the cluster: by the fork server where one runs, else as a Python of their own.

The fork server has torch imported, so a process that it forks is there in milliseconds. It is this process's own
(`nodes.launch.own_fork_server`), or the launcher's, which the environment variable WAFERBOX_FORK_SERVER names. Every
process started here lives at most as long as the process that asked for it and holds its Child; or, if it was asked for
as one that outlives it, as the fork server.
"""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from interconnect.security.own_tokens import without_tokens
from nodes.launch.child import Child, ForkServerStatus, PopenStatus
from nodes.launch.own_fork_server import own_ends_now, own_name
from nodes.launch.process import MODULES, SOCKET_VARIABLE

MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 16
START_DEADLINE_SECONDS = 60.0  # torch may have to come from a cold disk first


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
        if not own_ends_now():
            raise
    return _spawn_forked(_fork_server_name(), module, argv, fds, outlives=outlives)


# --- by the fork server -----------------------------------------------------------------------------------------------


def _fork_server_name() -> str:
    try:
        return own_name() or os.environ.get(SOCKET_VARIABLE, "")
    except OSError as error:
        raise SpawnError(f"a fork server could not be started in place of the one that ended: {error}") from error


def _spawn_forked(name: str, module: str, argv: Sequence[str], fds: Sequence[int], *, outlives: bool) -> Child:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(START_DEADLINE_SECONDS)
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
    command = [sys.executable, "-P", "-m", "nodes.launch.process"]
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

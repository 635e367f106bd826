"""A process that has the client imported, and what it imports in a step, and forks for each script of the tests.

A Python of its own for each would import them again, which takes more of the processors than what most scripts do. A
forked one is, but for that, what `python script.py` is: its main module, arguments, folder, environment, path, session
and end are its own.
"""

import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from waferbox import settings
from waferbox.host.descriptors import readable

MAX_BYTES = 1 << 17
START_SECONDS = 60.0  # for a busy machine


class ForkedScript:
    """As subprocess.Popen, of a script that the server forked."""

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
                raise subprocess.TimeoutExpired("the script", timeout or 0.0)
            self.returncode = int(self._connection.recv(MAX_BYTES))
            self._connection.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ScriptServer:
    """Owns the process, which ends when this object is closed, or with this process."""

    def __init__(self, temporary: Path) -> None:
        """temporary: a folder for what torch leaves behind."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **variables},
                start_new_session=True,
            )

    def start(
        self, script: Path, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], outputs: Sequence[int]
    ) -> ForkedScript:
        """outputs: descriptors for standard output and error."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"argv": [str(script), *arguments], "folder": str(folder), "variables": dict(variables)}
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno(), *outputs])
        return ForkedScript(mine)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(START_SECONDS)


def serve(requests: socket.socket) -> list[str]:
    """Until nobody can ask any more; in the process of a script, returns its words."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the scripts
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, 3)
        if not request:
            sys.exit(0)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    with socket.socket(fileno=fds[0]) as connection:
        script = os.fork()
        if script != 0:
            connection.send(str(script).encode())
            status = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
            with contextlib.suppress(OSError):  # whoever asked has ended
                connection.send(str(status).encode())
            os._exit(0)
    os.setsid()
    for number, fd in enumerate(fds[1:], 1):
        os.dup2(fd, number)
        os.close(fd)
    asked = json.loads(request)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    argv: list[str] = asked["argv"]
    return argv


def main() -> None:
    """The server; and the script, in whose process this ends as that of a Python that ran it."""
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401

    from cstorch._internal.checked_backend.backends import install_check
    from cstorch.distributed import streaming

    gc.collect()
    gc.freeze()  # what is here stays shared with the scripts
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    streaming._asked = mmap.mmap(-1, len(streaming._asked))  # the scripts would share this memory
    if settings.CHECK.is_set():  # the import of cstorch would have read it
        install_check()
    script = Path(sys.argv[0]).absolute()
    sys.path[0] = str(script.parent)
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


if __name__ == "__main__":
    main()

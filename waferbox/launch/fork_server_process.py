"""The fork server as the process that starts it sees it: a launcher's, or one of this process's own."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

from waferbox import deadlines, settings
from waferbox.host.descriptors import readable
from waferbox.launch.installation import python_command
from waferbox.security.tokens import without_tokens

# --- The fork server as the process that starts it sees it: its name, its end, and what that end was ------------------


# What the roles need and what survives a fork: everything but gRPC. Named, not imported: the command needs none of it.
ROLES_PRELOAD = (
    "torch",
    "numpy",
    "waferbox.cirh.execution.kernel",
    "waferbox.cirh.execution.elementwise",
    "waferbox.lair.kernel",
    "wsc.v1.coordinator_pb2",
    "wsc.v1.management_pb2",
    "waferbox.links.hub",
    "waferbox.runtime.schedule",
)
COORDINATOR_PRELOAD = (*ROLES_PRELOAD, "appliance.compiler.artifacts")  # a coordinator comes after the nodes


class ForkServerProcess:
    """Owns a fork server, which ends, with all that it forked, when this object is closed or its process dies."""

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        output: int = 2,
        *,
        when_idle: Sequence[str] = (),
        own: bool = False,
    ) -> None:
        """Start it, without waiting for its imports: processes can be asked for at once.

        preload: modules for it to import, none of which may import grpc; when_idle: those that it imports once it can
        fork, and has forked what was asked for by then. output: the descriptor for what it and its children print:
        standard error, because standard output may be a pipe that somebody reads to its end. own: it forks for this
        process alone. What was asked for as outliving this goes on after it, and the fork server too.
        """
        self.name = f"waferbox-{secrets.token_hex(12)}"
        self._preload = preload
        self._when_idle = when_idle
        self._environment = {**environment, settings.FORK_SERVER.name: self.name}
        self._output = output
        self._own = own
        self._start()

    def restart(self) -> None:
        """Start another in place of one that has ended, under the same name. Raises OSError, and may be tried again."""
        self._forget()
        self._start()

    def _start(self) -> None:
        command = python_command("waferbox.launch.fork_server")
        command += ["--own"] if self._own else []
        command += [f"--when-idle={module}" for module in self._when_idle]
        reader, writer = os.pipe()
        self._ready = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by _forget
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"\0{self.name}")
                listener.listen(128)
                self._process = subprocess.Popen(
                    [*command, str(listener.fileno()), str(writer), *self._preload],
                    stdin=subprocess.PIPE,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[listener.fileno(), writer],
                    env=self._environment,
                    start_new_session=True,
                )
        finally:
            os.close(writer)
        self._pidfd = os.pidfd_open(self._process.pid)

    def _forget(self) -> None:
        """The process, which has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._ready.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable once the fork server has ended."""
        return self._pidfd

    def ready_fileno(self) -> int:
        """Readable once it has imported what it should, or has ended."""
        return self._ready.fileno()

    def poll(self) -> int | None:
        """The exit status of the fork server, or None while it runs."""
        return self._process.poll()

    def end(self) -> str:
        """How it ended, for the user; empty while it runs."""
        status = self.poll()
        if status is None:
            return ""
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the fork server (pid {self.pid}) {how}"

    def close(self) -> None:
        """End it and everything that it forked; where it is this process's own, all but what outlives this."""
        if self._pidfd < 0:
            return
        assert self._process.stdin is not None
        if not readable([self._ready], 0.0):
            self._process.kill()  # it still imports, and has forked nothing
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)  # a suspended one would not see the end of its input
        if not self._own:
            try:
                self._process.wait(deadlines.FORK_SERVER.close)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._forget()


# ----------------------------------------------------------------------------------------------------------------------
# The fork server of one process, for what it starts: where it was started by hand, or in a container of its own


logger = logging.getLogger(__name__)

_lock = threading.Lock()
_own: ForkServerProcess | None = None


@contextlib.contextmanager
def own_fork_server(preload: Sequence[str]) -> Iterator[None]:
    """Have what this process starts in the block forked by a server of its own, unless a launcher has one already.

    It imports `preload` from now on, beside what this process does. Where it dies, what it forked dies with it, and the
    next process that is asked for starts another. It ends with this process, once nothing is left that outlives that.
    """
    global _own
    if settings.FORK_SERVER.is_set():
        yield
        return
    _own = ForkServerProcess(preload, without_tokens(os.environ), own=True)
    try:
        yield
    finally:
        with _lock:
            ended, _own = _own, None
        ended.close()


def own_fork_server_name() -> str:
    """The name of this process's own fork server, which runs; empty if it has none. Raises OSError: none can start."""
    with _lock:
        if _own is None:
            return ""
        if _own.poll() is not None:
            logger.warning("%s; another takes its place", _own.end())
            _own.restart()
        return _own.name


def own_is_ending() -> bool:
    """Whether this process's own fork server is about to end, or has: whoever asked it for something asks again."""
    with _lock:
        return _own is not None and bool(readable([_own], deadlines.FORK_SERVER.own_end))

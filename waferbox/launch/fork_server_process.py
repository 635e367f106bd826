"""Fork servers in the process that starts them: a launcher's, or one that a process has for itself."""

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
from waferbox.launch.stop_signals import signal_name
from waferbox.security.tokens import without_tokens

CLOSE_SECONDS = 8.0  # more than the fork server grants its children

# Modules that roles import and that survive a fork, which gRPC does not. Names, since the command imports none of them.
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
    """A fork server, which ends with all that it forked when this object is closed or its owner's process dies.

    Used by one thread.
    """

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        output: int = 2,
        *,
        when_idle: Sequence[str] = (),
        own: bool = False,
    ) -> None:
        """Starts the server without waiting for its imports; requests wait for them.

        Args:
            preload: modules that it imports first, none of which may import grpc.
            environment: its environment, and that of its children.
            output: descriptor for its output and that of its children. By default standard error, since standard
                output may be a pipe that another process reads to its end.
            when_idle: modules that it imports once it has served the requests that waited.
            own: whether it forks for this process alone. Children that outlive this process then keep the server.

        Raises:
            OSError: the process cannot be started.
        """
        self.name = f"waferbox-{secrets.token_hex(12)}"
        self._preload = preload
        self._when_idle = when_idle
        self._environment = {**environment, settings.FORK_SERVER.name: self.name}
        self._output = output
        self._own = own
        self._start()

    def restart(self) -> None:
        """Starts another server in place of one that has ended, under the same name.

        Raises:
            OSError: the process cannot be started; the call may be repeated.
        """
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
        """Closes the descriptors of the process, which has ended."""
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
        """A descriptor that is readable once the server has ended."""
        return self._pidfd

    def ready_fileno(self) -> int:
        """A descriptor that is readable once the server has imported its modules, or has ended."""
        return self._ready.fileno()

    def poll(self) -> int | None:
        """The exit status of the server; None while it runs."""
        return self._process.poll()

    def end(self) -> str:
        """The end of the server in words for the user; empty while it runs."""
        status = self.poll()
        if status is None:
            return ""
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return f"the fork server (pid {self.pid}) {how}"

    def close(self) -> None:
        """Ends the server and its children; of an own server, all but the children that outlive this process."""
        if self._pidfd < 0:
            return
        assert self._process.stdin is not None
        if not readable([self._ready], 0.0):
            self._process.kill()  # it is still importing, and has no children
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


# --- A process's own fork server --------------------------------------------------------------------------------------
#
# For a process without a launcher: one that was started by hand, or in a container of its own.


logger = logging.getLogger(__name__)

_lock = threading.Lock()
_own: ForkServerProcess | None = None


@contextlib.contextmanager
def own_fork_server(preload: Sequence[str]) -> Iterator[None]:
    """Starts the processes of the block by an own fork server, unless a launcher has one.

    The server imports `preload` meanwhile. If it dies, its children die too, and the next request starts another
    server. It ends with this process, or after the last child that outlives this process.
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
    """The name of this process's own, running fork server; empty if it has none.

    Raises:
        OSError: the server has died, and another cannot be started.
    """
    with _lock:
        if _own is None:
            return ""
        if _own.poll() is not None:
            logger.warning("Another fork server is started: %s", _own.end())
            _own.restart()
        return _own.name


def own_is_ending() -> bool:
    """Whether this process's own fork server has ended, or ends within a second, so that a request is repeated."""
    with _lock:
        return _own is not None and bool(readable([_own], deadlines.FORK_SERVER.own_end))

"""The fork server: a process with torch imported, and without gRPC or threads, that forks other processes.

    waferbox.launch.fork_server [--own] [--when-idle MODULE] LISTENER_FD READY_FD [MODULE ...]

`waferbox.launch.fork_server_process` starts it. The server imports each MODULE and then closes READY_FD; it imports
those of --when-idle while no request waits.

Each connection requests one process, in one message of JSON. The server answers with the process's id at once, and with
its exit status at the end. The server ends a process whose connection closes, unless the request had `outlives`. The
server ends all processes when standard input ends, each by the signal that its request names. On SIGTERM it kills them,
since the one that has started it did not end it: for them it is the death of the server, after which jobs go on.

With --own the server acts for the process that has started it. It then kills a process whose connection closes, as the
kernel kills a child with its parent. When standard input ends, processes with `outlives` stay, and the server stays
with them.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from waferbox import deadlines
from waferbox.host.descriptors import SHORTAGES
from waferbox.host.process_limits import failed_start
from waferbox.launch.process import MODULES, enter, run_module
from waferbox.launch.spawn import MAX_FDS, MAX_MESSAGE_BYTES
from waferbox.launch.stop_signals import StopSignals

RETRY_SECONDS = 0.1  # between attempts to accept during a shortage of descriptors or memory


@dataclass(slots=True)
class _Forked:
    """A process that the server has forked."""

    pid: int
    pidfd: int
    connection: socket.socket | None  # None once the requesting process has closed it
    outlives: bool  # whether the process survives its connection
    end_signal: signal.Signals  # with which this server ends it
    kill_at: float | None = None  # time of SIGKILL, after the end signal


class ForkServer:
    """The loop of the server over its connections, its children and its signals. It has no threads, since it forks."""

    def __init__(self, listener: socket.socket, *, when_idle: Sequence[str], own: bool) -> None:
        self._listener = listener
        self._when_idle = list(when_idle)
        self._own = own
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Forked] = {}  # by pidfd
        self._callers: set[socket.socket] = set()  # without a request yet
        self._accept_at: float | None = None  # when connections are accepted again, after a shortage
        self._is_short = False  # of descriptors or memory; the shortage has been reported
        self._closing = False
        listener.setblocking(False)
        self._signals = StopSignals(signal.SIGTERM)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._signals, selectors.EVENT_READ, self._terminated)
        self._selector.register(0, selectors.EVENT_READ, self._input_ended)

    def serve(self) -> None:
        """Serves until standard input ends, or SIGTERM; then until the last child has ended."""
        while not (self._closing and not self._children):
            ready = self._selector.select(0.0 if self._when_idle else self._seconds_to_deadline())
            if not ready and self._when_idle:
                preload([self._when_idle.pop(0)])
            for key, _ in ready:
                if self._selector.get_map().get(key.fd) is key:  # an earlier event may have closed the descriptor
                    key.data()
            now = time.monotonic()
            if self._accept_at is not None and self._accept_at <= now:
                self._accept_at = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            for child in self._children.values():
                if child.kill_at is not None and child.kill_at <= now:
                    self._signal(child, signal.SIGKILL)
                    child.kill_at = None

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        deadlines += [] if self._accept_at is None else [self._accept_at]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _input_ended(self) -> None:
        self._selector.unregister(0)
        self._close(all_children=not self._own)

    def _terminated(self) -> None:
        self._selector.unregister(self._signals)
        for child in self._children.values():
            self._signal(child, signal.SIGKILL)
        self._close(all_children=True)

    def _close(self, *, all_children: bool) -> None:
        if not self._closing:
            self._closing = True
            self._when_idle.clear()
            if self._accept_at is None:
                self._selector.unregister(self._listener)
            self._accept_at = None
            for caller in self._callers:
                self._selector.unregister(caller)
                caller.close()
            self._callers.clear()
            self._listener.close()
        for child in self._children.values():
            if all_children or not child.outlives:
                self._end(child)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller has closed the connection
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            if not self._is_short:
                print(f"fork server: no process can be started: {error.strerror}", file=sys.stderr, flush=True)
            self._is_short = True
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + RETRY_SECONDS
            return
        self._is_short = False
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._callers.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read_request(connection))

    def _read_request(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._callers.discard(connection)
        fds: list[int] = []
        try:
            message, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_FDS)
            if flags & socket.MSG_CTRUNC:
                raise OSError("the fork server has no room for the descriptors of the process")
            request = json.loads(message)
            module, argv = request["module"], [str(argument) for argument in request["argv"]]
            if module not in MODULES:
                raise ValueError(f"{module!r} may not be started")
            outlives, end_signal = request.get("outlives") is True, signal.Signals(request["end_signal"])
            self._fork(connection, module, argv, fds, outlives=outlives, end_signal=end_signal)
        except (OSError, ValueError, KeyError, TypeError) as error:
            with contextlib.suppress(OSError):
                connection.send(str(error).encode()[:1000])
            connection.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(
        self,
        connection: socket.socket,
        module: str,
        argv: Sequence[str],
        fds: Sequence[int],
        *,
        outlives: bool,
        end_signal: signal.Signals,
    ) -> None:
        server = os.getpid()
        # A signal to the child would reach the server's wakeup descriptor until the child has closed that.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                os._exit(self._run_child(server, connection, module, argv, fds))
        except OSError as error:
            raise OSError(failed_start(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        child = _Forked(pid, pidfd, connection, outlives, end_signal)
        self._children[pidfd] = child
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(child))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(child))
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a closed connection is noticed at the next select
            socket.send_fds(connection, [json.dumps({"pid": pid, "server": server}).encode()], [pidfd])

    def _run_child(
        self, server: int, connection: socket.socket, module: str, argv: Sequence[str], fds: Sequence[int]
    ) -> int:
        """Runs the new process, which must not return into the server's loop, and returns its exit status."""
        status = 1
        try:
            self._signals.close()
            self._selector.close()
            for other in self._children.values():
                os.close(other.pidfd)
                if other.connection is not None:
                    other.connection.close()
            for inherited in (self._listener, connection, *self._callers):
                inherited.close()
            enter(parent=server, fds=fds)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            status = run_module(module, argv)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)

    def _reap(self, child: _Forked) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pidfd]
        if child.connection is not None:
            self._selector.unregister(child.connection)
            with contextlib.suppress(OSError):
                child.connection.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            child.connection.close()

    def _abandoned(self, child: _Forked) -> None:
        """Called when the connection of a child is readable: no second message comes, so the other end is closed."""
        assert child.connection is not None
        self._selector.unregister(child.connection)
        child.connection.close()
        child.connection = None
        if not child.outlives:
            self._end(child)

    def _end(self, child: _Forked) -> None:
        if self._own:
            self._signal(child, signal.SIGKILL)
        elif child.kill_at is None:
            self._signal(child, child.end_signal)
            child.kill_at = time.monotonic() + deadlines.FORK_SERVER.kill

    @staticmethod
    def _signal(child: _Forked, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, number)


def preload(modules: Sequence[str]) -> None:
    """Imports modules, whose memory the children then share."""
    gc.disable()  # imports leave next to no garbage, and its collection would take a sixth of their time
    for module in modules:
        importlib.import_module(module)
    if "grpc" in sys.modules:
        raise ImportError("a preloaded module imports grpc, which does not survive a fork")
    gc.freeze()  # a collection in a child would write to, and so copy, the shared pages
    gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(prog="waferbox.launch.fork_server")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--when-idle", action="append", default=[])
    parser.add_argument("listener", type=int)
    parser.add_argument("ready", type=int)
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    os.set_inheritable(listener.fileno(), False)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, by libgomp, when torch is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(options.modules)
    warnings.filterwarnings(
        "ignore", category=DeprecationWarning, message=".*fork.*"
    )  # of idle threads, in 3.12 and later
    os.close(options.ready)
    ForkServer(listener, when_idle=options.when_idle, own=options.own).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Signals that end a process, as a descriptor to wait for: none is lost, whatever the main thread does meanwhile.

Python calls a handler when the main thread next runs Python code. If a signal comes just before that thread waits for a
lock, as in `threading.Event.wait`, its handler would run only after the wait that the signal has to end.
"""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

from waferbox.host.threads import GuardedThread


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"; most real-time signals have none, and are "signal 40"."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


class StopSignals:
    """Some signals as a descriptor to select on. Made in the main thread; a process has one at a time."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """A descriptor that is readable once a signal has come."""
        return self._reader.fileno()

    def wait(self) -> int:
        """Waits for the next signal and returns its number; 0 after `end`."""
        received = self._reader.recv(1)
        return received[0] if received else 0

    def end(self) -> None:
        """Stops taking signals, which have no effect from now on. To be called in the main thread."""
        signal.set_wakeup_fd(-1)
        self._writer.close()

    def close(self) -> None:
        """Does as `end`, and closes the descriptor, on which no thread may be waiting."""
        self.end()
        self._reader.close()


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Context in which SIGINT, SIGTERM and SIGHUP end the process as SystemExit does, so that `finally` clauses run.

    Entered in the main thread. Signals that the process ignores, as under nohup, or handles itself stay as they are.
    """

    def end(number: int, frame: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)  # one more, as timeout(1) sends it, would end the clauses themselves
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {n: handler for n, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is end:  # else the process ends
                signal.signal(number, handler)


@contextlib.contextmanager
def on_stop_signal(call: Callable[[], None], on_defect: Callable[[Exception], None]) -> Iterator[None]:
    """Calls `call`, in a thread of its own, for each SIGTERM and SIGINT within the body. Entered in the main thread.

    on_defect: as of GuardedThread.
    """
    signals = StopSignals(signal.SIGTERM, signal.SIGINT)

    def watch() -> None:
        while signals.wait():
            call()

    watcher = GuardedThread(watch, name="stop-signals", on_defect=on_defect)
    watcher.start()
    try:
        yield
    finally:
        signals.end()
        watcher.join()
        signals.close()

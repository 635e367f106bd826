"""Signals that end a process, as something to wait for: none is lost, whatever the main thread does meanwhile.

Python calls a handler when the main thread next runs Python. A signal that comes just before that thread waits for a
lock, as it does in `threading.Event.wait`, would be heeded when that wait ends, which is what the signal was to do.
"""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

from waferbox.host.threads import GuardedThread


class StopSignals:
    """Some signals as a descriptor to select on. To be made in the main thread, once at a time in a process."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """Readable once a signal has come."""
        return self._reader.fileno()

    def wait(self) -> bool:
        """Until another signal comes; False once no more do."""
        return bool(self._reader.recv(1))

    def end(self) -> None:
        """No more signals come: they are without effect. In the main thread."""
        signal.set_wakeup_fd(-1)
        self._writer.close()

    def close(self) -> None:
        """As end, where nobody waits any more."""
        self.end()
        self._reader.close()


@contextlib.contextmanager
def on_stop_signal(call: Callable[[], None], on_defect: Callable[[Exception], None]) -> Iterator[None]:
    """Within it, each SIGTERM and SIGINT has `call` called, in a thread of its own. To be entered in the main thread.

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

"""Interrupts (Ctrl-C, the stop button of a notebook) that wait for the end of work which they would harm."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TypeVar

_Item = TypeVar("_Item")


class _Deferral:
    """The deferral of interrupts by the main thread. handler: that of the script, which gets them later."""

    def __init__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        self._handler = handler if callable(handler) else None  # the script may ignore interrupts
        self._frame: FrameType | None = None
        self._has_come = False

    def begin(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        """Gives the script the interrupt that has come; its handler raises KeyboardInterrupt unless it is another."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._has_come:
                self._has_come = False
                self._handler(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come, self._frame = True, frame


_deferral: _Deferral | None = None  # the present one; of the main thread, which alone gets signals


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers interrupts to the end of the context.

    For calls of libraries, such as HDF5's, that lose an interrupt, or make another error of it.
    """
    global _deferral
    if threading.current_thread() is not threading.main_thread() or _deferral is not None:
        yield
        return
    _deferral = _Deferral()
    _deferral.begin()
    try:
        yield
    finally:
        ended, _deferral = _deferral, None
        ended.end()


def interruptible(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yields the items; while each is made, interrupts come as ever, although the caller defers them."""
    deferral = _deferral if threading.current_thread() is threading.main_thread() else None
    iterator = iter(items)
    while True:
        try:
            if deferral is not None:
                deferral.end()
            item = next(iterator)
        except StopIteration:
            return
        finally:
            if deferral is not None:
                deferral.begin()
        yield item

"""Conditions that coroutines wait for and any thread makes true."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class Changes:
    """A condition variable of coroutines. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def notify(self) -> None:
        """Makes all waiting coroutines check their conditions. Never blocks."""
        with self._lock:
            for event, loop in self._waiting.items():
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(event.set)

    async def wait_for(self, condition: Callable[[], _Found], seconds: float) -> _Found:
        """Waits until condition() is true; returns its last value, at the latest after this many seconds."""
        event = asyncio.Event()
        with self._lock:
            self._waiting[event] = asyncio.get_running_loop()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not condition():
                        await event.wait()
                        event.clear()
            return condition()
        finally:
            with self._lock:
                del self._waiting[event]

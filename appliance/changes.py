"""Conditions that coroutines of one event loop wait for."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class Changes:
    """A condition variable of the coroutines of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, None] = {}  # in the order of their waits

    def notify(self) -> None:
        """Makes all waiting coroutines check their conditions."""
        for event in self._waiting:
            event.set()

    async def wait_for(self, condition: Callable[[], _Found], seconds: float) -> _Found:
        """Waits until condition() is true; returns its last value, at the latest after this many seconds."""
        event = asyncio.Event()
        self._waiting[event] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not condition():
                        await event.wait()
                        event.clear()
            return condition()
        finally:
            del self._waiting[event]

"""Messages from threads to a coroutine."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

_Message = TypeVar("_Message")


class Mailbox(Generic[_Message]):
    """Messages in the order in which they were put. To be made in the event loop that reads it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._messages: deque[_Message] = deque()
        self._closed = False

    def __len__(self) -> int:
        """How many wait to be read."""
        return len(self._messages)

    def put(self, message: _Message) -> None:
        """From any thread; never blocks. No effect once the mailbox is closed."""
        if self._closed:
            return
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """Nothing more will come: messages() ends after what was put before. From any thread; never blocks."""
        self._closed = True
        self._wake()

    async def messages(self) -> AsyncIterator[_Message]:
        """All messages, until the mailbox is closed."""
        while True:
            closed = self._closed  # read first: what was put before the end is not lost
            while self._messages:
                yield self._messages.popleft()
            if closed:
                return
            await self._changed.wait()
            self._changed.clear()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads
            self._loop.call_soon_threadsafe(self._changed.set)

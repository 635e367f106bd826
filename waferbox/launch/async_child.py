"""A process that this process has requested, for an event loop."""

import asyncio

from waferbox.launch.spawn import Child


class AsyncChild:
    """A Child whose waits are coroutines. To be made in the event loop that uses it; `close` is the last call."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._end = asyncio.create_task(self._wait())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def cause(self) -> str:
        """After wait: as Child.cause."""
        return self._child.cause

    async def wait(self) -> int:
        """Returns the exit status, once the process has ended."""
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()

    async def close(self, seconds: float) -> None:
        """Ends the process, if it runs, by SIGTERM, and after so many seconds by SIGKILL. Releases all resources."""
        self.terminate()
        await asyncio.wait([self._end], timeout=seconds)
        self.kill()
        await asyncio.wait([self._end])
        self._child.close()

    async def _wait(self) -> int:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._child.fileno(), ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._child.fileno())
        return await asyncio.to_thread(self._child.wait)  # the fork server may send the status late

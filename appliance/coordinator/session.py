"""The client's session: the messages to the client, and the detection of its end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from appliance.compiler.core.progress import Progress
from waferbox import deadlines
from waferbox.host.event_loop import Changes, Mailbox
from wsc.v1 import coordinator_pb2


class ClientSession:
    """The session of a job's client; at most one. Used in one event loop."""

    def __init__(
        self,
        on_missing: Callable[[], None],
        seconds: float,
        is_ingress_up: Callable[[], Awaitable[bool]] | None = None,
        on_cut_off: Callable[[], bool] | None = None,
    ) -> None:
        """Makes a session that is not open.

        Args:
            on_missing: called if no client has connected within `seconds`.
            seconds: until the client must open the session.
            is_ingress_up: whether the ingress that runs this process lives; None: no ingress runs it.
            on_cut_off: called when the connection to a client broke. Returns True if the client may be alive: then this
                process is about to end, and a successor waits for the client.
        """
        self.is_open = False  # whether a client has opened it, even if it has ended since
        self._on_missing = on_missing
        self._seconds = seconds
        self._is_ingress_up = is_ingress_up
        self._on_cut_off = on_cut_off
        self._changes = Changes()
        self._ended = False
        self._closed = False
        self._sent_progress: Progress | None = None
        self._messages: Mailbox[coordinator_pb2.SessionResponse] = Mailbox()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Starts the client's time."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_missing)

    def open(self) -> bool:
        """Opens the session; False if it was opened before."""
        if self._timer is not None:
            self._timer.cancel()
        if self.is_open:
            return False
        self.is_open = True
        self._changes.notify()
        return True

    async def end(self, *, is_finished: bool) -> None:
        """Notes the end of the client's stream. is_finished: whether the client had announced it."""
        self._ended = True
        self._changes.notify()
        if not is_finished:
            await self.check_connection()

    async def check_connection(self) -> None:
        """Waits if a stream may have ended against the client's intention; to be called before the job ends for it.

        If the ingress has died or the client was cut off, this process is about to be ended: the call waits for that.
        """
        is_orphaned = False
        if self._is_ingress_up is not None:
            # The port of a dying ingress may still accept connections. This process is ended with it, during the wait.
            await self._changes.until(lambda: self._closed, deadlines.COORDINATION.ingress_dying)
            is_orphaned = not await self._is_ingress_up()
        if is_orphaned or await self._is_cut_off():
            await self._changes.until(lambda: self._closed, deadlines.COORDINATION.orphaned)

    async def _is_cut_off(self) -> bool:
        if self._on_cut_off is None:
            return False
        return await self._changes.until(lambda: self._ended, deadlines.COORDINATION.together) and self._on_cut_off()

    def reconnects(self) -> bool:
        """Handles a client that reconnects before its loss was noticed; True if a successor waits for it."""
        return self._on_cut_off is not None and self._on_cut_off()

    async def wait_until_open(self, seconds: float) -> None:
        """Waits for the client to open the session."""
        await self._changes.until(lambda: self.is_open, seconds)

    def send(self, message: coordinator_pb2.SessionResponse) -> None:
        """Queues a message to the client. Never blocks."""
        self._messages.put(message)

    def send_progress(self, progress: Progress | None) -> None:
        """Queues the progress of a compile, unless it is the last that was sent. None: no step is compiled."""
        if progress is not None and progress != self._sent_progress:
            message = coordinator_pb2.CompileProgress(stage=progress.stage, done=progress.done, of=progress.of)
            self.send(coordinator_pb2.SessionResponse(compiling=message))
        self._sent_progress = progress

    def messages(self) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        """Yields the messages to the client, until close."""
        return self._messages.messages()

    def close(self) -> None:
        """Ends the messages."""
        self._closed = True
        self._changes.notify()
        if self._timer is not None:
            self._timer.cancel()
        self._messages.close()

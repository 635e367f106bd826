"""HTTP as uvicorn speaks it, with a deadline for the head of a request and statuses that say what was too long.

Uvicorn has a timeout between requests only: a connection that never sends the whole head of a request would be held for
ever, and count towards the limit of connections.
"""

import asyncio
import http
import sys
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS: Final = 5.0
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_WAITING: Final = 32  # connections whose request is not there yet; the oldest gives way


class PageProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None  # of the head that is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        waiting = {
            one._deadline.when(): one
            for one in self.connections
            if isinstance(one, PageProtocol) and one._deadline is not None
        }
        if len(waiting) > MAX_WAITING:
            oldest = waiting[min(waiting)]
            oldest._end_deadline()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._await_head()  # the next request of the connection has begun

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The head of a request is wrong, or too long."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        self._refuse(status)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._refuse, 408)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int) -> None:
        self._end_deadline()
        phrase = http.HTTPStatus(status).phrase
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=phrase.encode()),
            h11.Data(data=phrase.encode()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

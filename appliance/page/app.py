"""The HTTP application of the page: its addresses, its policy, and the deadlines of connections.

Addresses: `/` the cluster, `/jobs/NAME` a job, and below each `events`, its server-sent events; `/jobs/NAME/curves`
those of its outputs alone; `/static` the files of the pages; `/targets` the addresses from which Prometheus collects
metrics.
"""

import asyncio
import http
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import h11
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from appliance.drawing.pages import STYLE
from appliance.page import compile_report, rendering, streams
from appliance.page.source import PageSource
from waferbox.security.guard import CHALLENGE, may_view
from wsc.v1 import management_pb2

HEAD_SECONDS: Final = 5.0
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_WAITING: Final = 32  # connections that have not sent the head of a request; the oldest one is closed for a new one


class PageProtocol(H11Protocol):
    """A connection, with a deadline for the head of a request, and statuses for too long addresses and headers.

    Uvicorn has a timeout only between requests. A connection that never sends the whole head of a request would be
    held for ever, and count towards the limit of connections. Runs in the page's event loop.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None  # for the head of the next request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        # Half-open connections must not use up the limit of connections.
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
        """Answers a head that is malformed or too long."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        # Without a line break in what was received, the address in the first line is what is too long.
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


# --- Addresses --------------------------------------------------------------------------------------------------------

MAX_ADDRESS_BYTES: Final = 4096

_STATIC: Final = Path(__file__).with_name("static")

# A page loads only its own files and contains no script or style, so text from a job can never become one.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The page of a compile report contains its style, and no script that is run.
_REPORT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def make_app(
    source: PageSource, closing: asyncio.Event, hosts: Sequence[str] = ("*",), *, for_viewers: bool = False
) -> Starlette:
    """Makes the application.

    Args:
        source: the cluster that is shown.
        closing: ends the streams of events when it is set.
        hosts: the allowed Host headers. Restricting them prevents DNS rebinding: a page from elsewhere whose name
            resolves to this address.
        for_viewers: whether requests need a viewer's token.
    """

    async def cluster(request: Request) -> Response:
        return HTMLResponse(rendering.cluster_page(await source.nodes(), await source.jobs()))

    async def cluster_events(request: Request) -> Response:
        return _events(streams.cluster_stream(source, closing))

    async def job(request: Request) -> Response:
        return HTMLResponse(rendering.job_page(await _job(request), await source.jobs()))

    async def job_events(request: Request) -> Response:
        return _events(streams.job_stream(source, (await _job(request)).job, closing))

    async def job_curves(request: Request) -> Response:
        return _events(streams.curve_stream(source, (await _job(request)).job, closing))

    async def job_report(request: Request) -> Response:
        job = await _job(request)
        place = request.path_params["place"]
        page = compile_report.read_page(job.artifacts[place]) if place < len(job.artifacts) else None
        if page is None:
            raise HTTPException(404, "This job has no compile report, or no longer has one.")
        # The page is a file that can be read anywhere; here it belongs to a job.
        linked = page.replace(b"<main>", b"<main>\n" + rendering.way_to_job(job).encode(), 1)
        return HTMLResponse(linked, headers={"Content-Security-Policy": _REPORT_POLICY})

    async def report_style(request: Request) -> Response:
        return FileResponse(STYLE)

    async def targets(request: Request) -> Response:
        found = await source.targets()
        # A meta label is for relabelling, and meets no label of the metrics, which have the role themselves.
        return JSONResponse(
            [{"targets": [address], "labels": {"__meta_waferbox_role": role}} for role, address in found]
        )

    async def _job(request: Request) -> management_pb2.JobInfo:
        name = request.path_params["name"]
        found = await source.job(name)
        if found is None:
            raise HTTPException(404, f"The cluster has no job {name!r}. Jobs that ended long ago are not kept.")
        return found

    return Starlette(
        routes=[
            Route("/", cluster),
            Route("/events", cluster_events),
            Route("/targets", targets),
            Route("/jobs/{name}", job),
            Route("/jobs/{name}/events", job_events),
            Route("/jobs/{name}/curves", job_curves),
            Route("/jobs/{name}/reports/{place:int}", job_report),
            Route("/static/report.css", report_style),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
            Middleware(_Guard, for_viewers=for_viewers),
        ],
        exception_handlers={HTTPException: _refused},
    )


def _events(stream: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(stream, media_type="text/event-stream")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = "Not found" if error.status_code == 404 else f"Error {error.status_code}"
    return HTMLResponse(rendering.error_page(title, error.detail), error.status_code)


class _Guard:
    """Middleware that refuses long addresses and unauthorized requests, and adds the policy to each response."""

    def __init__(self, app: ASGIApp, *, for_viewers: bool) -> None:
        self._app = app
        self._for_viewers = for_viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", _POLICY)
                headers.setdefault("Cache-Control", "no-cache")
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        if scope["type"] == "http" and len(scope["raw_path"]) + len(scope["query_string"]) > MAX_ADDRESS_BYTES:
            await PlainTextResponse("URI Too Long", 414)(scope, receive, guarded)
            return
        if self._for_viewers and not may_view(Headers(scope=scope).get("authorization", "")):
            await PlainTextResponse("Unauthorized", 401, dict([CHALLENGE]))(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

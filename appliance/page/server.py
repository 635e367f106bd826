"""The server of the page, in a thread of the management process."""

import asyncio
import logging
import socket
import threading
from typing import Final

from appliance.page.source import PageSource
from waferbox.host.threads import GuardedThread
from waferbox.rpc.address import is_loopback, split_address

MAX_CONNECTIONS: Final = 128
END_SECONDS: Final = 3.0

logger = logging.getLogger(__name__)


class PageServer:
    """The server of the page. It owns its port from the beginning, and a thread from `start` until `close`.

    Thread-safe. If its thread fails, the error is logged, and the cluster runs on without its page.
    """

    def __init__(self, listen: str) -> None:
        """Opens the port.

        Args:
            listen: host:port; port 0: any free one.

        Raises:
            OSError: the address is invalid, or cannot be listened at.
        """
        try:
            self._host, port = split_address(listen, any_port=True)
            bare = self._host.strip("[]")
            family = socket.AF_INET6 if ":" in bare else socket.AF_INET
            self._socket = socket.create_server((bare, port), family=family)
        except (ValueError, OSError) as error:
            raise OSError(f"the page cannot listen at {listen}: {error}") from error
        self.address = f"{self._host}:{self._socket.getsockname()[1]}"
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = GuardedThread(self._run, name="page", on_defect=self._defect)

    @property
    def url(self) -> str:
        return f"http://{self.address}/"

    def start(self, source: PageSource) -> None:
        """Starts the thread, and returns at once. The source is called in the thread's event loop."""
        self._source = source
        self._thread.start()

    def close(self) -> None:
        """Ends the streams and the thread, and closes the port."""
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            with self._lock:
                self._loop = None

    def _defect(self, error: Exception) -> None:
        """Handles an error of the thread: the cluster runs on without its page."""
        logger.error("The page at %s has ended", self.url)
        self._socket.close()

    async def _serve(self) -> None:
        # Imported here: they take half a second to load, for which the start of a cluster should not wait.
        import uvicorn

        from appliance.page.app import MAX_HEAD_BYTES, PageProtocol, make_app

        with self._lock:
            if self._closed:
                return
            self._loop = asyncio.get_running_loop()
        is_local = is_loopback(self._host)
        hosts = ("127.0.0.1", "localhost", self._host) if is_local else ("*",)
        config = uvicorn.Config(
            make_app(self._source, self._closing, hosts, for_viewers=not is_local),
            http=PageProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([self._socket]))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait([serving, closing], return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
        finally:
            closing.cancel()

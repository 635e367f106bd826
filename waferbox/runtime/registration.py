"""The registration of a node with management: it renews the lease, and is repeated when management restarts."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from waferbox import deadlines
from waferbox.host.event_loop import Changes
from waferbox.rpc.server import status_of
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)


# Status codes that another attempt does not change: another version of Waferbox, an address that cannot be reached.
REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class Registration:
    """The registration of one node. A task holds the Register stream, and opens it again when it breaks.

    Used in one event loop.
    """

    def __init__(
        self,
        management: str,
        hello: Callable[[], management_pb2.RegisterRequest],
        on_refusal: Callable[[str], None],
        open_channel: Callable[[str], grpc.aio.Channel],
        on_job_ended: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            management: the host:port of management.
            hello: returns the next message, with the job that the node works for.
            on_refusal: called once, with a message, when management refuses the node, or the task has a defect; the
                process should exit then.
            open_channel: opens a channel to an address.
            on_job_ended: called with the name of a job that has ended, if the node keeps states on disk. It must not
                block.
        """
        self.instance = secrets.token_hex(8)  # names the current registration, or the next
        self._registered = False  # whether management has this instance
        self._management = management
        self._hello = hello
        self._on_refusal = on_refusal
        self._open_channel = open_channel
        self._on_job_ended = on_job_ended
        self._interval = deadlines.REGISTRATION.first_heartbeat
        self._changes = Changes()  # of whether a stream has ended
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to register, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the stream, and so the registration."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            self._on_refusal(await self._keep_registered())
        except Exception as error:
            logger.exception("a defect in the registration")
            self._on_refusal(f"a defect in this node's registration: {error!r}")

    async def _keep_registered(self) -> str:
        """Registers again and again, until management refuses the node; returns the reason."""
        reported = ""
        while True:
            try:
                await self._hold()
            except grpc.RpcError as error:
                status = status_of(error)
                if status.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return f"what listens at {self._management} is no management service: check the port"
                if status.code() in REFUSALS:
                    return f"{self._management} refuses this node: {status.details()}"
                if reported != status.details():
                    reported = status.details() or ""
                    logger.warning("no management at %s: %s; trying again", self._management, reported)
            await asyncio.sleep(deadlines.REGISTRATION.retry)

    async def _hold(self) -> None:
        """Holds one Register stream, from its first message to its end."""
        ended = asyncio.get_running_loop().create_future()
        if self._registered:
            self.instance, self._registered = secrets.token_hex(8), False
        channel = self._open_channel(self._management)
        try:
            stub = management_pb2_grpc.ManagementStub(channel)
            token = cluster_secret().token(Kind.NODE)
            async for response in stub.Register(self._requests(ended), metadata=(bearer(token),)):
                if response.ended_job:
                    if self._on_job_ended is not None:
                        self._on_job_ended(response.ended_job)
                    continue
                self._registered = True
                self._interval = max(0.05, response.lease_seconds / deadlines.REGISTRATION.heartbeats_per_lease)
                logger.debug("registered as %s", response.node_id)
        finally:
            ended.set_result(None)
            self._changes.notify()
            await channel.close(None)

    async def _requests(self, ended: "asyncio.Future[None]") -> AsyncIterator[management_pb2.RegisterRequest]:
        while not ended.done():
            hello = self._hello()
            hello.instance = self.instance
            yield hello
            await self._changes.until(ended.done, self._interval)

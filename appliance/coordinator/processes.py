"""The processes of coordinators: children of management or an ingress, and an ingress's as management has them."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import grpc

from appliance.coordinator.record import remove_left
from appliance.coordinator.settings import CoordinatorHome
from waferbox import deadlines
from waferbox.launch.async_child import AsyncChild
from waferbox.launch.spawn import Child, ForkServerLost
from waferbox.links.socket_names import host_id
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2

logger = logging.getLogger(__name__)

SPAWN_RETRY_SECONDS: Final = 0.2  # between attempts to start a coordinator, while the fork server is replaced


class ProcessLost(RuntimeError):
    """Raised when neither the state nor the exit status of the process can be determined."""


class CoordinatorProcess(Protocol):
    """The process of a coordinator. Without a call of close it outlives this process."""

    @property
    def cause(self) -> str:
        """After wait: the cause, if the process ended together with another one; else empty."""

    async def wait(self) -> int:
        """Returns the exit status, once it has ended. Raises ProcessLost."""

    def terminate(self) -> None:
        """Requests its end, which is a death like others if it may get a successor."""

    def kill(self) -> None:
        """Ends it at once."""

    async def close(self, seconds: float) -> None:
        """Ends the process if it still runs, at once after so many seconds, and releases all resources."""


class CoordinatorProcesses(Protocol):
    """The control of the processes of coordinators."""

    async def start(self, request: ingress_pb2.RunCoordinatorRequest, ingress: str) -> CoordinatorProcess:
        """Starts a coordinator: at the ingress of this address, or here if that is empty. Raises SpawnError."""

    def find(self, hello: management_pb2.CoordinatorHello) -> CoordinatorProcess | None:
        """Returns the process of a coordinator that an earlier service started; None if it cannot be found."""

    async def forget(self, job: str) -> None:
        """Removes what the coordinators of a job that has ended have left on this host: one that dies leaves all."""


class HostProcesses:
    """The processes of coordinators: started on this host, or by an ingress on its host."""

    def __init__(self, home: CoordinatorHome, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        """home: of the coordinators that no ingress runs. open_channel: opens a channel to an address."""
        self._home = home
        self._open_channel = open_channel

    async def start(self, request: ingress_pb2.RunCoordinatorRequest, ingress: str) -> CoordinatorProcess:
        if ingress:
            return IngressProcess(ingress, self._open_channel(ingress), request)
        now = asyncio.get_running_loop().time  # which stands still while this process is stopped
        until = now() + deadlines.COORDINATION.spawn
        while True:
            try:
                return AsyncChild(await asyncio.to_thread(self._home.start, request))
            except ForkServerLost:
                if now() > until:
                    raise
            await asyncio.sleep(SPAWN_RETRY_SECONDS)

    def find(self, hello: management_pb2.CoordinatorHello) -> CoordinatorProcess | None:
        if hello.ingress or hello.host != host_id():
            return None
        child = Child.find("appliance.coordinator", hello.process_id, hello.process_started)
        return None if child is None else AsyncChild(child)

    async def forget(self, job: str) -> None:
        await asyncio.to_thread(remove_left, self._home.cache_root, job)


class IngressProcess:
    """A coordinator that an ingress runs."""

    cause = ""

    def __init__(self, ingress: str, channel: grpc.aio.Channel, request: ingress_pb2.RunCoordinatorRequest) -> None:
        """Requests the start; wait raises ProcessLost if it failed. ingress: its address. close closes the channel."""
        self._ingress = ingress
        self._job = request.job
        self._channel = channel
        self._stub: ingress_pb2_grpc.IngressAsyncStub = ingress_pb2_grpc.IngressStub(channel)
        self._shown = (bearer(cluster_secret().token(Kind.MANAGEMENT)),)
        self._end = asyncio.create_task(self._run(request))
        self._signals: set[asyncio.Task[None]] = set()

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        self._signal(kill=False)

    def kill(self) -> None:
        self._signal(kill=True)

    async def close(self, seconds: float) -> None:
        if not self._end.done():
            self.terminate()
            await asyncio.wait([self._end], timeout=seconds)
        if not self._end.done():
            self.kill()
            await asyncio.wait([self._end], timeout=deadlines.END.signal)
        for task in (self._end, *self._signals):
            task.cancel()
        await self._channel.close(None)

    async def _run(self, request: ingress_pb2.RunCoordinatorRequest) -> int:
        try:
            return (await self._stub.RunCoordinator(request, metadata=self._shown)).status
        except grpc.aio.AioRpcError as error:
            raise ProcessLost(f"the ingress at {self._ingress} does not run it: {error.details()}") from error

    def _signal(self, *, kill: bool) -> None:
        task = asyncio.create_task(self._send_signal(kill=kill))
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def _send_signal(self, *, kill: bool) -> None:
        if self._end.done():
            return
        request = ingress_pb2.EndCoordinatorRequest(job=self._job, kill=kill)
        try:
            await self._stub.EndCoordinator(request, timeout=deadlines.END.signal, metadata=self._shown)
        except grpc.aio.AioRpcError as error:
            logger.warning("the ingress at %s did not end %s: %s", self._ingress, self._job, error.details())

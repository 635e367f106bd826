"""The coordinators that this ingress runs: management asks for them, and they go on when it dies, but end with us.

Where we end or die, management has the ingress that is started in our place run others, which take up the jobs.
"""

import asyncio
import logging
from typing import Final

import grpc

from appliance.coordinator.record import OrphanedJobs, is_kept
from appliance.coordinator.settings import CoordinatorHome, FolderRefused
from waferbox import deadlines
from waferbox.launch.spawn import Child, SpawnError
from waferbox.rpc.async_server import Context
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)


class Coordinators(ingress_pb2_grpc.IngressServicer):
    """Serves Ingress, in an event loop: a coordinator costs a task, not a thread."""

    def __init__(self, home: CoordinatorHome) -> None:
        """home: theirs; they do not outlive this process."""
        self._home = home
        self._runs: dict[str, asyncio.Task[int]] = {}  # by job
        self._children: dict[str, Child] = {}  # those of them that have been started
        self._closing = False

    def count(self) -> int:
        """How many run. From any thread."""
        return len(self._children)

    async def RunCoordinator(
        self, request: ingress_pb2.RunCoordinatorRequest, context: Context
    ) -> ingress_pb2.RunCoordinatorResponse:
        try:
            # The coordinator goes on where the call breaks off.
            status = await asyncio.shield(self._begin(request))
        except (SpawnError, FolderRefused) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return ingress_pb2.RunCoordinatorResponse(status=status)

    def _begin(self, request: ingress_pb2.RunCoordinatorRequest) -> "asyncio.Task[int]":
        job = request.job
        if self._closing:
            raise SpawnError("the ingress is going down")
        if request.restarted and job in self._runs:
            return self._runs[job]
        if job in self._runs:
            raise SpawnError(f"{job} has a coordinator")
        run = self._runs[job] = asyncio.create_task(self._run(request))

        def forget(run: "asyncio.Task[int]") -> None:
            del self._runs[job]
            if not run.cancelled() and (error := run.exception()) is not None:
                logger.info("the coordinator of %s did not start: %s", job, error)

        run.add_done_callback(forget)
        return run

    async def _run(self, request: ingress_pb2.RunCoordinatorRequest) -> int:
        """The exit status of a coordinator, once it has ended."""
        child = await asyncio.to_thread(self._home.start, request)
        logger.info("the coordinator of %s has pid %d", request.job, child.pid)
        self._children[request.job] = child
        if self._closing:
            child.terminate()
        try:
            await _readable(child.fileno())
            status = await asyncio.to_thread(child.wait)
        finally:
            del self._children[request.job]
            child.close()
        logger.info("the coordinator of %s has ended with status %d", request.job, status)
        return status

    async def EndCoordinator(
        self, request: ingress_pb2.EndCoordinatorRequest, context: Context
    ) -> ingress_pb2.EndCoordinatorResponse:
        child = self._children.get(request.job)
        if child is not None and request.kill:
            child.kill()
        elif child is not None:
            child.terminate()
        return ingress_pb2.EndCoordinatorResponse()

    async def close(self) -> None:
        """End all coordinators, and start no more; jobs that others can take up wait for those."""
        self._closing = True
        for job, child in self._children.items():
            if is_kept(self._home.cache_root, job):
                child.kill()
            else:
                child.terminate()
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=deadlines.END.coordinator)
        for child in self._children.values():
            child.kill()
        if self._runs:
            await asyncio.wait(self._runs.values())


async def _readable(descriptor: int) -> None:
    """Waits until there is something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# The ingress before this one has died with its coordinators: management is told of their jobs, should it not know


LOOK_SECONDS: Final = 0.5  # between looks for coordinators that have ended


async def report_orphaned_jobs(left: OrphanedJobs, management: grpc.aio.Channel) -> None:
    """Until management has been told of all; it may have died too, and not be back yet."""
    stub: management_pb2_grpc.ManagementAsyncStub = management_pb2_grpc.ManagementStub(management)
    while left:
        await asyncio.gather(*(_report_orphan(hello, stub) for hello in await asyncio.to_thread(left.take)))
        await asyncio.sleep(LOOK_SECONDS)


async def _report_orphan(
    hello: management_pb2.CoordinatorHello, stub: "management_pb2_grpc.ManagementAsyncStub"
) -> None:
    request = management_pb2.AdoptJobRequest(hello=hello)
    shown = (bearer(cluster_secret().token(Kind.COORDINATOR, hello.job)),)
    try:
        await stub.AdoptJob(request, timeout=deadlines.COORDINATION.left, metadata=shown, wait_for_ready=True)
    except grpc.RpcError as error:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        logger.warning("%s is given up: management does not take it up: %s", hello.job, reason)

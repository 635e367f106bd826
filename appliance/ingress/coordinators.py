"""The coordinators that an ingress runs, at the request of management. They outlive management, but not the ingress.

After the end of an ingress, management lets the next one run successors, which take over the jobs.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc

from appliance.coordinator.processes import CoordinatorProcess, CoordinatorProcesses
from appliance.coordinator.record import Orphans
from appliance.coordinator.settings import FolderRefused
from waferbox import deadlines
from waferbox.launch.spawn import SpawnError
from waferbox.rpc.async_server import Context
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)


class Coordinators(ingress_pb2_grpc.IngressServicer):
    """Serves Ingress, in an event loop: a coordinator costs a task, not a thread."""

    def __init__(self, processes: CoordinatorProcesses, is_kept: Callable[[str], bool]) -> None:
        """Makes the service without coordinators.

        Args:
            processes: the control of the coordinators' processes, which do not outlive this one.
            is_kept: whether a successor could take over this job.
        """
        self._processes = processes
        self._is_kept = is_kept
        self._runs: dict[str, asyncio.Task[int]] = {}  # by job
        self._children: dict[str, CoordinatorProcess] = {}  # the processes of those that have been started
        self._closing = False

    def count(self) -> int:
        """Returns the number of running coordinators. Thread-safe."""
        return len(self._children)

    async def RunCoordinator(
        self, request: ingress_pb2.RunCoordinatorRequest, context: Context
    ) -> ingress_pb2.RunCoordinatorResponse:
        try:
            # The coordinator outlives the call.
            status = await asyncio.shield(self._begin(request))
        except (SpawnError, FolderRefused) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return ingress_pb2.RunCoordinatorResponse(status=status)

    def _begin(self, request: ingress_pb2.RunCoordinatorRequest) -> "asyncio.Task[int]":
        job = request.job
        if self._closing:
            raise SpawnError("the ingress is shutting down")
        if request.restarted and job in self._runs:
            return self._runs[job]
        if job in self._runs:
            raise SpawnError(f"{job} has a coordinator")
        if request.only_await:
            raise SpawnError("it has ended, alone or with an earlier ingress")
        run = self._runs[job] = asyncio.create_task(self._run(request))

        def forget(run: "asyncio.Task[int]") -> None:
            del self._runs[job]
            if not run.cancelled() and (error := run.exception()) is not None:
                logger.info("the coordinator of %s did not start: %s", job, error)

        run.add_done_callback(forget)
        return run

    async def _run(self, request: ingress_pb2.RunCoordinatorRequest) -> int:
        """Runs a coordinator; returns its exit status."""
        child = await self._processes.start(request, "")
        self._children[request.job] = child
        if self._closing:
            child.terminate()
        status = await child.wait()
        del self._children[request.job]
        await child.close(0.0)
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
        """Ends all coordinators and starts no more; a job that can be taken over is left to a successor."""
        self._closing = True
        for job, child in self._children.items():
            if self._is_kept(job):
                child.kill()
            else:
                child.terminate()
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=deadlines.END.coordinator)
        for child in self._children.values():
            child.kill()
        if self._runs:
            await asyncio.wait(self._runs.values())


# --- Orphaned jobs of an earlier ingress, reported to management ------------------------------------------------------


LOOK_SECONDS: Final = 0.5  # between searches for coordinators that have ended


async def report_orphaned_jobs(left: Orphans, management: grpc.aio.Channel) -> None:
    """Reports all orphaned jobs to management, which may have died too: waits for its return."""
    stub: management_pb2_grpc.ManagementAsyncStub = management_pb2_grpc.ManagementStub(management)
    while left:
        await asyncio.gather(*(_report_orphan(hello, stub) for hello in await asyncio.to_thread(left.take, ())))
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
        logger.warning("%s is given up: management does not adopt it: %s", hello.job, reason)

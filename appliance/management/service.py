"""The management service: nodes register here, clients create jobs, coordinators request nodes.

It needs nothing on disk. Jobs outlive it; after a restart at the same address, nodes and coordinators connect again
and send their state.

All state belongs to one event loop, and calls are its coroutines, so that an open stream costs no thread. Operations
that may block, such as the start of a process, run in threads, and their results come back to the loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NoReturn, TypeVar

import grpc

from appliance.coordinator.processes import CoordinatorProcesses
from appliance.coordinator.record import Orphans
from appliance.coordinator.settings import FolderRefused, cache_directory
from appliance.finished_jobs import FinishedJobs
from appliance.job_history import KINDS, JobHistory
from appliance.management.coordination import BadRequest
from appliance.management.jobs import JobEntry, TooManyJobs
from appliance.management.nodes.registry import RegistryFull
from appliance.management.observation import ObservationService
from appliance.management.requests import (
    MAX_KEYS,
    complete,
    is_artifact,
    problem_of_job,
    problem_of_labels,
    problem_of_node,
    problem_of_nodes,
    problem_of_priority,
    problem_of_report,
    shown,
)
from appliance.management.supervisor import ManagementSettings, Supervisor
from waferbox import deadlines, roles
from waferbox.host.clock import Clock, SystemClock, seconds_since_1970
from waferbox.host.event_loop import Mailbox
from waferbox.rpc.async_server import Context, when_over
from waferbox.rpc.server import INGRESS_KEY
from waferbox.security.guard import caller_of
from waferbox.security.tokens import Kind
from waferbox.wire_version import MISMATCH_REMEDY, WIRE_VERSION
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

STORE_SECONDS = 5.0  # for the jobs that end with the cluster
SCRIPT_CANCELS: Final = "its script was interrupted, or left its loop before the end"

logger = logging.getLogger(__name__)

KEEPER_ROLES: Final = (node_pb2.ROLE_MEMORYX, node_pb2.ROLE_WAFER)  # they keep states: see Topology.state_keepers


_Request = TypeVar("_Request")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementState:
    """The state of a management service from which its metrics are made.

    Attributes:
        nodes: all registered nodes.
        jobs: live ones, and the last that ended.
    """

    nodes: Sequence[management_pb2.NodeInfo]
    jobs: Sequence[JobEntry]


class ManagementService(management_pb2_grpc.ManagementServicer):
    """Serves Management. All methods are called in its event loop; coordinators may outlive it."""

    def __init__(
        self,
        settings: ManagementSettings,
        on_shutdown: Callable[[], None],
        on_defect: Callable[[Exception], None],
        clock: Clock | None = None,
        random: Random | None = None,
        finished: FinishedJobs | None = None,
    ) -> None:
        """Makes the service; `start` begins to supervise.

        Args:
            settings: of the service.
            on_shutdown: called at a user's request to end the service.
            on_defect: as of Supervisor.
            clock: as of Supervisor.
            random: as of Supervisor.
            finished: keeps the jobs that end beyond the cluster; None: they are not kept.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._supervisor = Supervisor(settings, self._job_ended, on_defect, self._clock, random)
        self._registry = self._supervisor.registry
        self._jobs = self._supervisor.jobs
        self.observation = ObservationService(self._jobs, self._supervisor.coordination_of)
        self.metrics = ""  # where this process serves metrics for Prometheus, as host:port; empty: nowhere
        self._on_shutdown = on_shutdown
        # The responses to the registered nodes whose disks may have states of jobs, by node.
        self._keepers: dict[str, Mailbox[management_pb2.RegisterResponse]] = {}
        self._finished = finished
        self._storing: set[asyncio.Task[None]] = set()

    def start(self, address: str, processes: CoordinatorProcesses, orphans: Orphans) -> None:
        """As Supervisor.start."""
        self._supervisor.start(address, processes, orphans)

    async def close(self, *, end_jobs: bool) -> None:
        """As Supervisor.close."""
        await self._supervisor.close(end_jobs=end_jobs)
        if self._storing:
            await asyncio.wait(self._storing, timeout=STORE_SECONDS)

    def _store(self, job: JobEntry) -> None:
        """Stores a job that has ended, in a thread: the disk may be slow."""
        if self._finished is not None:
            (info,), add = self.describe([job]), self._finished.add
            task = asyncio.create_task(asyncio.to_thread(lambda: add(info, job.history.kept(KINDS))))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """Returns all registered nodes."""
        return self._registry.nodes()

    def jobs(self) -> Sequence[JobEntry]:
        """Returns live jobs, and the last that ended."""
        return self._jobs.all()

    def describe(self, jobs: Sequence[JobEntry]) -> Sequence[management_pb2.JobInfo]:
        """Describes jobs for clients and pages."""
        queue = self._registry.queue_status()
        infos = []
        for job in jobs:
            status = self._jobs.with_holders(queue.get(job.name, management_pb2.QueueStatus()))
            held = self._registry.held(job.name)
            info = job.describe(seconds_since_1970(self._clock), status, held)
            info.seconds_left = 0.0 if job.ended else job.pace.seconds_left(self._clock.monotonic())
            folder = cache_directory(self._settings.cache_root, self._settings.compile_root, job.request.compile_dir)
            info.artifacts.extend(str(folder / artifact) for artifact in job.report.artifacts if is_artifact(artifact))
            infos.append(info)
        return infos

    async def state(self) -> ManagementState:
        """Returns the state from which metrics are made."""
        return ManagementState(nodes=self.nodes(), jobs=self.jobs())

    def describe_one(self, name: str) -> management_pb2.JobInfo | None:
        """Describes the job of this name, if there is one."""
        job = self._jobs.find(name)
        return None if job is None else self.describe([job])[0]

    def owner_of(self, name: str) -> str | None:
        """Returns the user who owns this job, if there is one."""
        job = self._jobs.find(name)
        return None if job is None else job.request.user

    def history(self, name: str) -> JobHistory | None:
        """Returns the history of this job, if there is one."""
        job = self._jobs.find(name)
        return None if job is None else job.history

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def Register(
        self,
        request_iterator: AsyncIterator[management_pb2.RegisterRequest],
        context: Context,
    ) -> AsyncIterator[management_pb2.RegisterResponse]:
        hello = await _first(request_iterator, context)
        await _check(problem_of_node(hello), context)
        if hello.version != WIRE_VERSION:
            await _refuse_version(context, "this node", hello.version)
        try:
            node_id = self._registry.add(hello)
        except RegistryFull as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        responses: Mailbox[management_pb2.RegisterResponse] = Mailbox()
        if hello.role in KEEPER_ROLES:
            self._keepers[node_id] = responses

        def left() -> None:
            self._keepers.pop(node_id, None)
            self._registry.remove(node_id, "it left, or died")

        when_over(context, left)  # called at once at any end of the stream
        logger.info("%s registered as %s", roles.role_of(hello.role).module, node_id)
        responses.put(management_pb2.RegisterResponse(node_id=node_id, lease_seconds=self._settings.lease_seconds))
        reading = asyncio.create_task(self._read_heartbeats(node_id, request_iterator, responses))
        when_over(context, reading.cancel)
        async for response in responses.messages():
            yield response
        await reading  # raises its exception

    async def _read_heartbeats(
        self,
        node_id: str,
        requests: AsyncIterator[management_pb2.RegisterRequest],
        responses: Mailbox[management_pb2.RegisterResponse],
    ) -> None:
        """Renews the lease of a node with each heartbeat, and ends the responses with the last."""
        try:
            async for heartbeat in requests:
                if not self._registry.renew(node_id, heartbeat.job):
                    return  # too late; the node will register again
        finally:
            responses.close()

    def _job_ended(self, job: JobEntry) -> None:
        """Stores a job, and reports its end to nodes whose disks may have its states: it may have left these hosts."""
        self._store(job)
        if job.request.max_num_restarts:
            for responses in self._keepers.values():
                responses.put(management_pb2.RegisterResponse(ended_job=job.name))

    async def ListNodes(
        self, request: management_pb2.ListNodesRequest, context: Context
    ) -> management_pb2.ListNodesResponse:
        wait_seconds = min(max(0.0, request.wait_seconds), deadlines.QUERIES.longest_wait)
        await self._registry.changes.until(lambda: self._registry.count() >= request.at_least, wait_seconds)
        return management_pb2.ListNodesResponse(nodes=self._registry.nodes(), metrics=self.metrics)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def CreateJob(
        self, request: management_pb2.CreateJobRequest, context: Context
    ) -> management_pb2.CreateJobResponse:
        if request.version != WIRE_VERSION:
            await _refuse_version(context, "this client", request.version)
        await self._check_job(request, context)
        caller = caller_of(context.invocation_metadata())
        if caller is not None and caller.kind is Kind.USER:
            request.user = caller.name
        through_ingress = any(key == INGRESS_KEY for key, _ in context.invocation_metadata() or ())
        wait_seconds = deadlines.JOB_CREATION.ingress_return if through_ingress else 0.0
        ingress = await self._registry.changes.until(self._registry.ingress, wait_seconds)
        try:
            job = self._supervisor.create(request, ingress)
        except TooManyJobs as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        seconds = deadlines.JOB_CREATION.coordinator
        in_time = await job.changes.until(lambda: job.coordinator or job.ended, seconds)
        if not job.coordinator:
            message = job.report.message if in_time else f"it did not answer within {seconds:g} s"
            self._supervisor.give_up(job)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the coordinator of {job.name} did not start: {message}. The log of the cluster has its error; if "
                "Waferbox was removed or installed anew below the running cluster, start the cluster again",
            )
        return management_pb2.CreateJobResponse(
            job=job.name, coordinator=job.coordinator, token=job.token, gateway=through_ingress
        )

    async def _check_job(self, request: management_pb2.CreateJobRequest, context: Context) -> None:
        await _check(problem_of_job(request), context)
        try:
            cache_directory(self._settings.cache_root, self._settings.compile_root, request.compile_dir)
        except FolderRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        complete(request)

    async def Coordinate(
        self,
        request_iterator: AsyncIterator[management_pb2.CoordinateRequest],
        context: Context,
    ) -> AsyncIterator[management_pb2.CoordinateResponse]:
        first = await _first(request_iterator, context)
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        job = await self._job_of(first.hello, context)
        coordination = self._supervisor.attach(job, first.hello.address)
        when_over(context, lambda: self._supervisor.detach(job, coordination))
        if first.hello.HasField("request"):
            coordination.report(first.hello.report)  # the last one may have been lost with the last stream
        reading = asyncio.create_task(coordination.read(request_iterator))
        when_over(context, reading.cancel)
        async for response in coordination.responses():
            yield response
        if reading.done() and (error := reading.exception()) is not None:
            if isinstance(error, BadRequest):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise error

    async def _job_of(self, hello: management_pb2.CoordinatorHello, context: Context) -> JobEntry:
        """Returns the job of a coordinator; adopts one that an earlier management service created."""
        await _check_own_job(hello, context)
        job = self._jobs.live(hello.job)
        if hello.HasField("request"):
            await self._check_hello(hello, context)
        if job is not None:
            return job
        if self._jobs.find(hello.job) is not None or not hello.HasField("request"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{hello.job} has ended")
        try:
            return self._supervisor.adopt(hello)
        except TooManyJobs as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def AdoptJob(
        self, request: management_pb2.AdoptJobRequest, context: Context
    ) -> management_pb2.AdoptJobResponse:
        await _check_own_job(request.hello, context)
        await self._check_hello(request.hello, context)
        try:
            self._supervisor.adopt_orphan(request.hello)
        except TooManyJobs as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return management_pb2.AdoptJobResponse()

    async def _check_hello(self, hello: management_pb2.CoordinatorHello, context: Context) -> None:
        """Checks the hello of a coordinator that has had an answer before."""
        if hello.request.version != WIRE_VERSION:
            await _refuse_version(context, "this coordinator", hello.request.version)
        await self._check_job(hello.request, context)
        await _check(problem_of_report(hello.report) or problem_of_nodes(hello.nodes), context)

    async def ListJobs(
        self, request: management_pb2.ListJobsRequest, context: Context
    ) -> management_pb2.ListJobsResponse:
        return management_pb2.ListJobsResponse(jobs=self.describe(self._jobs.all()))

    async def GetJob(self, request: management_pb2.GetJobRequest, context: Context) -> management_pb2.GetJobResponse:
        job = await self._find(request.job, context)
        wait_seconds = min(max(0.0, request.wait_seconds), deadlines.QUERIES.longest_wait)
        lost = request.lost_coordinator
        await job.changes.until(lambda: job.ended or (lost and job.coordinator not in ("", lost)), wait_seconds)
        return management_pb2.GetJobResponse(job=self.describe([job])[0])

    async def CancelJob(
        self, request: management_pb2.CancelJobRequest, context: Context
    ) -> management_pb2.CancelJobResponse:
        job = await self._find(request.job, context)
        cause = request.error or (SCRIPT_CANCELS if request.by_script else "")
        self._supervisor.cancel(job, cause, is_error=bool(request.error))
        return management_pb2.CancelJobResponse()

    async def SetPriority(
        self, request: management_pb2.SetPriorityRequest, context: Context
    ) -> management_pb2.SetPriorityResponse:
        job = await self._find(request.job, context)
        await _check(problem_of_priority(request.priority), context)
        if job.ended:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{job.name} has ended")
        job.request.priority = request.priority
        self._registry.set_priority(job.name, request.priority)
        self._supervisor.send_request(job)
        return management_pb2.SetPriorityResponse()

    async def LabelJob(
        self, request: management_pb2.LabelJobRequest, context: Context
    ) -> management_pb2.LabelJobResponse:
        job = await self._find(request.job, context)
        await _check(problem_of_labels([*request.add, *job.request.labels]), context)
        if len(request.remove) > MAX_KEYS:
            message = f"at most {MAX_KEYS} labels can be removed at once, not {len(request.remove)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        job.label(request.add, request.remove)
        self._supervisor.send_request(job)
        return management_pb2.LabelJobResponse(labels=job.request.labels)

    async def _find(self, name: str, context: Context) -> JobEntry:
        job = self._jobs.find(name)
        if job is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {shown(name)}")
        return job

    async def Shutdown(
        self, request: management_pb2.ShutdownRequest, context: Context
    ) -> management_pb2.ShutdownResponse:
        when_over(context, self._on_shutdown)  # after the answer: then the server stops
        return management_pb2.ShutdownResponse()


async def _first(requests: AsyncIterator[_Request], context: Context) -> _Request:
    """Returns the first message of a stream."""
    try:
        async with asyncio.timeout(deadlines.JOB_CREATION.hello):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream did not begin with a hello")


async def _refuse_version(context: Context, caller: str, version: str) -> NoReturn:
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{caller} is of Waferbox version {shown(version) if version else 'unknown'}, and this cluster of version "
        f"{WIRE_VERSION}: {MISMATCH_REMEDY}",
    )


async def _check_own_job(hello: management_pb2.CoordinatorHello, context: Context) -> None:
    caller = caller_of(context.invocation_metadata())
    if caller is None or caller.name != hello.job:
        message = f"the token is not that of the coordinator of a job {shown(hello.job)}"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


async def _check(problem: str, context: Context) -> None:
    if problem:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

"""The management service: nodes register here, clients ask for jobs, coordinators ask for nodes.

It keeps nothing on disk but the key of its tokens. When it ends, jobs go on; when it is started anew at the same
address, nodes and coordinators come back and tell it what it must know.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import grpc

from appliance.coordinator.settings import END_SECONDS, CoordinatorHome, cache_directory
from appliance.management.coordination import Coordination
from appliance.management.coordinator_process import IngressProcess, ProcessLost
from appliance.management.job_tokens import JobTokens
from appliance.management.jobs import ENDED, Job, JobTable
from appliance.management.observation import ObservationService
from appliance.management.registry import NodeRegistry
from appliance.management.requests import complete, is_artifact, problem_of_job, problem_of_labels, problem_of_priority
from appliance.members import PACKAGES
from interconnect.rpc.server import INGRESS_KEY
from interconnect.rpc.version import __version__
from nodes.launch.spawn import SpawnError
from wsc.v1 import ingress_pb2, management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)

COORDINATOR_SECONDS = 50.0  # until a coordinator must have said hello
COORDINATOR_RETURN_SECONDS = 10.0  # until a coordinator must be back whose process we do not know
INGRESS_RETURN_SECONDS = 3.0  # until an ingress must be back that handed a call on
CAUSE_SECONDS = 1.0  # until the launcher has said why it ends the cluster; and until scripts have asked for that
MAX_CAUSE_LENGTH = 1000
MAX_WAIT_SECONDS = 10.0  # of a ListNodes call


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    cache_root: Path  # artifacts of the compiler lie below it; also takes the key of the tokens
    lease_seconds: float = 5.0  # a node that says nothing for so long is lost
    jobs_outlive: bool = True  # a management service that follows this one may take over its jobs


class ManagementService(management_pb2_grpc.ManagementServicer):
    """Serves Management, and owns the thread that watches leases and queue; coordinators may outlive it."""

    def __init__(self, settings: ManagementSettings, on_shutdown: Callable[[], None]) -> None:
        """on_shutdown() is called when somebody asks for the end of the service."""
        self._settings = settings
        self._registry = NodeRegistry(settings.lease_seconds, self._node_lost)
        self._jobs = JobTable()
        self._tokens = JobTokens(settings.cache_root if settings.jobs_outlive else None)
        self._coordinations: dict[str, Coordination] = {}
        self._lock = threading.Lock()
        self.observation = ObservationService(self._jobs, self._coordinations.get)
        self.metrics = ""  # where this process serves figures for Prometheus, as host:port; empty: nowhere
        self._home: CoordinatorHome | None = None
        self._closing = threading.Event()
        self._cause = ""  # what has happened to the cluster, once that has been told
        self._cause_told = threading.Event()
        self._on_shutdown = on_shutdown
        self._watch = threading.Thread(target=self._keep_watch, name="watch", daemon=True)

    def start(self, home: CoordinatorHome) -> None:
        """Begin. home: of the coordinators that no ingress runs, with our address."""
        self._home = home
        self._registry.address = home.management
        self._watch.start()

    def close(self, *, end_jobs: bool) -> None:
        """Stop to watch. end_jobs: end all jobs, with their coordinators; else they go on without us."""
        self._closing.set()
        self._watch.join()
        jobs = self._jobs.all_live()
        if not end_jobs:
            if jobs:
                names = ", ".join(job.name for job in jobs)
                address = self._registry.address
                logger.warning("%s: going on; a management service started at %s takes over", names, address)
            return
        for job in jobs:
            if (process := job.process) is not None:
                process.terminate()
            else:
                self._cancel(job)
        if self._cause:
            deadline = time.monotonic() + CAUSE_SECONDS
            for job in jobs:
                job.end_told.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + END_SECONDS
        for job in jobs:
            job.over.wait(max(0.0, deadline - time.monotonic()))
            if (process := job.process) is not None:
                process.close(max(0.0, deadline - time.monotonic()))

    def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All that are there."""
        return self._registry.nodes()

    def jobs(self) -> Sequence[Job]:
        """All that are under way, and the last that ended."""
        return self._jobs.all()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def Register(
        self, request_iterator: Iterator[management_pb2.RegisterRequest], context: grpc.ServicerContext
    ) -> Iterator[management_pb2.RegisterResponse]:
        hello = next(request_iterator, None)
        if hello is None:
            return
        if hello.role not in PACKAGES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no role {hello.role}")
        if not hello.address:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a node must say at which address it listens")
        if hello.version != __version__:
            _refuse_version(context, "this node", hello.version)
        node_id = self._registry.add(hello)
        logger.info("%s registered as %s", PACKAGES[hello.role], node_id)
        reason = "it left, or died"
        try:
            yield management_pb2.RegisterResponse(node_id=node_id, lease_seconds=self._settings.lease_seconds)
            for _ in request_iterator:
                if not self._registry.renew(node_id):
                    return  # too late; it will register anew
        except grpc.RpcError:
            reason = "the connection to it broke"
        finally:
            self._registry.remove(node_id, reason)

    def ListNodes(
        self, request: management_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListNodesResponse:
        wait_seconds = min(max(0.0, request.wait_seconds), MAX_WAIT_SECONDS)
        nodes = self._registry.nodes(request.at_least, wait_seconds)
        return management_pb2.ListNodesResponse(nodes=nodes, metrics=self.metrics)

    def _keep_watch(self) -> None:
        while not self._closing.wait(self._settings.lease_seconds / 10):
            for node_id in self._registry.expire():
                logger.warning("%s has said nothing for %g s: given up", node_id, self._settings.lease_seconds)
            self._registry.review()
            for job in self._jobs.all_live():
                away_since = job.away_since
                if away_since is not None and time.monotonic() - away_since > COORDINATOR_RETURN_SECONDS:
                    self._end(job, management_pb2.JOB_PHASE_FAILED, "its coordinator is gone")

    def _node_lost(self, node: management_pb2.NodeInfo, reason: str) -> None:
        logger.info("%s (%s), which works for %s, is lost: %s", node.node_id, PACKAGES[node.role], node.job, reason)
        with self._lock:
            coordination = self._coordinations.get(node.job)
        if coordination is not None:
            coordination.lost(node)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def CreateJob(
        self, request: management_pb2.CreateJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CreateJobResponse:
        if request.version != __version__:
            _refuse_version(context, "this client", request.version)
        _check(problem_of_job(request), context)
        complete(request)
        job = self._jobs.create(request, self._tokens.token)
        self._registry.open(job.name)
        through_ingress = any(key == INGRESS_KEY for key, _ in context.invocation_metadata())
        try:
            self._start_coordinator(job, self._registry.ingress(INGRESS_RETURN_SECONDS if through_ingress else 0.0))
        except SpawnError as error:
            self._end(job, management_pb2.JOB_PHASE_FAILED, str(error))
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        in_time = job.hello.wait(COORDINATOR_SECONDS)
        if not job.coordinator:
            message = job.report.message if in_time else f"it did not answer within {COORDINATOR_SECONDS:g} s"
            if (process := job.process) is not None:
                process.kill()
            context.abort(grpc.StatusCode.INTERNAL, f"the coordinator of {job.name} did not start: {message}")
        return management_pb2.CreateJobResponse(
            job=job.name, coordinator=job.coordinator, token=job.token, gateway=through_ingress
        )

    def _start_coordinator(self, job: Job, ingress: str) -> None:  # empty: here, and not at an ingress
        assert self._home is not None
        request = ingress_pb2.RunCoordinatorRequest(
            job=job.name, token=job.token, created=job.created, compile_dir=job.request.compile_dir
        )
        job.process = IngressProcess(ingress, request) if ingress else self._home.start(request)
        name = f"coordinator-{job.name}"
        threading.Thread(target=self._watch_coordinator, args=(job,), name=name, daemon=True).start()

    def _watch_coordinator(self, job: Job) -> None:
        """The end of the process is the end of the job, whatever it said before."""
        process = job.process
        assert process is not None
        try:
            self._process_ended(job, process.wait())
        except ProcessLost as error:
            self._process_lost(job, str(error))
        if not self._closing.is_set():
            process.close()

    def _process_ended(self, job: Job, status: int) -> None:
        with self._lock:
            coordination = self._coordinations.get(job.name)
        if coordination is not None:
            coordination.end()
        if job.report.phase in ENDED:
            self._end(job, job.report.phase, job.report.message)
        elif job.cancelled:
            self._end(job, management_pb2.JOB_PHASE_CANCELLED, "cancelled")
        else:
            if status == -signal.SIGKILL:
                self._cause_told.wait(CAUSE_SECONDS)  # the whole cluster may have been killed
            message = self._cause or f"its coordinator ended with status {status}"
            self._end(job, management_pb2.JOB_PHASE_FAILED, message)

    def _process_lost(self, job: Job, reason: str) -> None:
        """A coordinator that has said hello may still be there."""
        if not job.hello.is_set():
            self._end(job, management_pb2.JOB_PHASE_FAILED, reason)
        with self._lock:
            job.process = None
            if job.name in self._coordinations:
                return
        self._away(job)

    def _end(self, job: Job, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        last = job.report
        report = management_pb2.JobReport(
            phase=phase, message=message, step=last.step, num_steps=last.num_steps, artifacts=last.artifacts
        )
        job.nodes = job.nodes or self._registry.held(job.name)
        if self._jobs.end(job, report):
            self._registry.release(job.name)
            job.hello.set()
            job.over.set()

    def Coordinate(
        self, request_iterator: Iterator[management_pb2.CoordinateRequest], context: grpc.ServicerContext
    ) -> Iterator[management_pb2.CoordinateResponse]:
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "hello":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        job = self._job_of(first.hello, context)
        coordination = Coordination(job, self._registry, request_iterator)
        with self._lock:
            former = self._coordinations.get(job.name)  # broken, though we may not have noticed
            self._coordinations[job.name] = coordination
            job.away_since = None
        if former is not None:
            former.end()
        if not context.add_callback(lambda: self._coordination_over(job, coordination)):
            self._coordination_over(job, coordination)
            return
        job.coordinator = first.hello.address
        job.hello.set()
        if job.cancelled:
            coordination.cancel()
        yield from coordination.responses()

    def _job_of(self, hello: management_pb2.CoordinatorHello, context: grpc.ServicerContext) -> Job:
        """The job that a coordinator serves; one that an earlier start of this service had made is taken over."""
        if not self._tokens.belongs(hello.token, hello.job):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"the token is not that of a job {hello.job!r} of this cluster"
            )
        job = self._jobs.live(hello.job)
        if job is not None:
            return job
        if self._jobs.find(hello.job) is not None or not hello.HasField("request"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"{hello.job} has ended")
        if hello.request.version != __version__:
            _refuse_version(context, "this coordinator", hello.request.version)
        _check(problem_of_job(hello.request), context)
        complete(hello.request)
        job = self._jobs.adopt(hello)
        self._registry.open(job.name)
        logger.info("%s is back", job.name)
        return job

    def _coordination_over(self, job: Job, coordination: Coordination) -> None:
        coordination.end()
        with self._lock:
            if self._coordinations.get(job.name) is not coordination:
                return
            del self._coordinations[job.name]
            if job.process is not None:
                return  # it comes back, or ends, which is watched
        self._away(job)

    def _away(self, job: Job) -> None:
        """The coordinator is not there, and nobody watches its process: it has some time to come back."""
        job.away_since = time.monotonic()
        if job.report.phase in ENDED:
            self._end(job, job.report.phase, job.report.message)

    def ListJobs(
        self, request: management_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListJobsResponse:
        return management_pb2.ListJobsResponse(jobs=[self._describe(job) for job in self._jobs.all()])

    def GetJob(
        self, request: management_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.GetJobResponse:
        job = self._find(request.job, context)
        info = self._describe(job)
        if info.phase in ENDED and not context.add_callback(job.end_told.set):
            job.end_told.set()
        return management_pb2.GetJobResponse(job=info)

    def _describe(self, job: Job) -> management_pb2.JobInfo:
        info = job.describe(self._registry)
        folder = cache_directory(self._settings.cache_root, job.request.compile_dir)
        info.artifacts.extend(str(folder / artifact) for artifact in job.report.artifacts if is_artifact(artifact))
        return info

    def CancelJob(
        self, request: management_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CancelJobResponse:
        job = self._find(request.job, context)
        if not job.ended:
            self._cancel(job)
        return management_pb2.CancelJobResponse()

    def SetPriority(
        self, request: management_pb2.SetPriorityRequest, context: grpc.ServicerContext
    ) -> management_pb2.SetPriorityResponse:
        job = self._find(request.job, context)
        _check(problem_of_priority(request.priority), context)
        if job.ended:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{job.name} has ended")
        job.request.priority = request.priority
        self._registry.set_priority(job.name, request.priority)
        self._tell_request(job)
        return management_pb2.SetPriorityResponse()

    def LabelJob(
        self, request: management_pb2.LabelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.LabelJobResponse:
        job = self._find(request.job, context)
        _check(problem_of_labels([*request.add, *job.request.labels]), context)
        with self._lock:
            job.label(request.add, request.remove)
        self._tell_request(job)
        return management_pb2.LabelJobResponse(labels=job.request.labels)

    def _find(self, name: str, context: grpc.ServicerContext) -> Job:
        job = self._jobs.find(name)
        if job is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {name!r}")
        return job

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        with self._lock:
            coordination = self._coordinations.get(job.name)
        if coordination is not None:
            coordination.cancel()
        elif (process := job.process) is not None:
            process.terminate()

    def _tell_request(self, job: Job) -> None:
        """The coordinator brings it back to the management service that may follow this one."""
        with self._lock:
            coordination = self._coordinations.get(job.name)
        if coordination is not None:
            coordination.changed()

    def Shutdown(
        self, request: management_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> management_pb2.ShutdownResponse:
        self._cause = request.cause[:MAX_CAUSE_LENGTH]
        self._cause_told.set()
        # After the answer: the server is about to stop.
        if not context.add_callback(self._on_shutdown):
            self._on_shutdown()
        return management_pb2.ShutdownResponse()


def _refuse_version(context: grpc.ServicerContext, who: str, version: str) -> Never:
    context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{who} is waferbox version {version or 'unknown'}, the management service is version {__version__}",
    )
    raise AssertionError  # abort raises


def _check(problem: str, context: grpc.ServicerContext) -> None:
    if problem:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

"""The management service: nodes register here, clients ask for jobs, coordinators ask for nodes."""

import hmac
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import grpc

from appliance.management.coordination import Coordination
from appliance.management.jobs import ENDED, Job, JobTable
from appliance.management.registry import PACKAGES, NodeRegistry
from interconnect.version import __version__
from interconnect.zygote import SpawnError, spawn
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

logger = logging.getLogger(__name__)

COORDINATOR_SECONDS = 30.0  # until a coordinator must have said hello
COORDINATOR_END_SECONDS = 7.0  # until it must have let its nodes go
MAX_WAIT_SECONDS = 10.0  # of a ListNodes call
MAX_WAFERS = 1024
MAX_WORKERS_PER_WAFER = 256
MAX_RUN_AHEAD_STEPS = 100_000
DEFAULT_RUN_AHEAD_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    cache_root: Path  # artifacts of the compiler lie below it
    lease_seconds: float = 5.0  # a node that says nothing for so long is lost
    gateway: bool = False  # clients reach the other processes through this one


class ManagementService(management_pb2_grpc.ManagementServicer):
    """Serves Management, and owns the coordinators' processes and the thread that watches the leases."""

    def __init__(self, settings: ManagementSettings, on_shutdown: Callable[[], None]) -> None:
        """on_shutdown() is called when somebody asks for the end of the service."""
        self._settings = settings
        self._registry = NodeRegistry(settings.lease_seconds, self._node_lost)
        self._jobs = JobTable()
        self._coordinations: dict[str, Coordination] = {}
        self._lock = threading.Lock()
        self._address = self._listen_host = ""
        self._closing = threading.Event()
        self._on_shutdown = on_shutdown
        self._leases = threading.Thread(target=self._watch_leases, name="leases", daemon=True)

    def start(self, address: str, listen_host: str) -> None:
        """Begin. address: the one that coordinators dial; listen_host: where they listen themselves."""
        self._address = self._registry.address = address
        self._listen_host = listen_host
        self._leases.start()

    def close(self) -> None:
        """End all jobs, with their coordinators."""
        self._closing.set()
        self._leases.join()
        for job in self._jobs.all_live():
            if job.child is not None:
                job.child.terminate()
        for job in self._jobs.all_live():
            if job.child is not None:
                job.child.close(COORDINATOR_END_SECONDS)

    def serves_clients(self, address: str) -> bool:
        """Whether a coordinator of a live job, or a MemoryX node, listens at this address."""
        if any(job.coordinator == address for job in self._jobs.all_live()):
            return True
        nodes = self._registry.nodes()
        return any(node.address == address and node.role == node_pb2.ROLE_MEMORYX for node in nodes)

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
        return management_pb2.ListNodesResponse(nodes=self._registry.nodes(request.at_least, wait_seconds))

    def _watch_leases(self) -> None:
        while not self._closing.wait(self._settings.lease_seconds / 10):
            for node_id in self._registry.expire():
                logger.warning("%s has said nothing for %g s: given up", node_id, self._settings.lease_seconds)

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
        problem = _problem(request)
        if problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        if not request.run_ahead_steps:
            request.run_ahead_steps = DEFAULT_RUN_AHEAD_STEPS
        job = self._jobs.create(request)
        try:
            self._start_coordinator(job)
        except SpawnError as error:
            self._end(job, management_pb2.JOB_PHASE_FAILED, str(error))
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        in_time = job.hello.wait(COORDINATOR_SECONDS)
        if not job.coordinator:
            message = job.report.message if in_time else f"it did not answer within {COORDINATOR_SECONDS:g} s"
            assert job.child is not None
            job.child.kill()
            context.abort(grpc.StatusCode.INTERNAL, f"the coordinator of {job.name} did not start: {message}")
        return management_pb2.CreateJobResponse(
            job=job.name, coordinator=job.coordinator, token=job.token, gateway=self._settings.gateway
        )

    def _start_coordinator(self, job: Job) -> None:
        settings = {
            "job": job.name,
            "token": job.token,
            "management": self._address,
            "listen": f"{self._listen_host}:0",
            "cache": str(_cache_directory(self._settings.cache_root, job.request.compile_dir)),
        }
        # Over a pipe: other users of the machine can read the arguments of a process.
        reader, writer = os.pipe()
        try:
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(settings, pipe)
            job.child = spawn("appliance.coordinator", [], [reader])
        finally:
            os.close(reader)
        threading.Thread(
            target=self._watch_coordinator, args=(job,), name=f"coordinator-{job.name}", daemon=True
        ).start()

    def _watch_coordinator(self, job: Job) -> None:
        """The end of the process is the end of the job, whatever it said before."""
        assert job.child is not None
        status = job.child.wait()
        with self._lock:
            coordination = self._coordinations.pop(job.name, None)
        if coordination is not None:
            coordination.end()
        if job.report.phase in ENDED:
            self._end(job, job.report.phase, job.report.message)
        elif job.cancelled:
            self._end(job, management_pb2.JOB_PHASE_CANCELLED, "cancelled")
        else:
            self._end(job, management_pb2.JOB_PHASE_FAILED, f"its coordinator ended with status {status}")
        if not self._closing.is_set():
            job.child.close()

    def _end(self, job: Job, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        last = job.report
        report = management_pb2.JobReport(phase=phase, message=message, step=last.step, num_steps=last.num_steps)
        self._jobs.end(job, report)
        self._registry.release(job.name)
        job.hello.set()

    def Coordinate(
        self, request_iterator: Iterator[management_pb2.CoordinateRequest], context: grpc.ServicerContext
    ) -> Iterator[management_pb2.CoordinateResponse]:
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "hello":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        job = self._jobs.live(first.hello.job)
        if job is None or not hmac.compare_digest(first.hello.token, job.token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such job, or another token")
            return
        coordination = Coordination(job, self._registry, request_iterator)
        with self._lock:
            if job.name in self._coordinations:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{job.name} has a coordinator")
            self._coordinations[job.name] = coordination
        if not context.add_callback(coordination.end):
            return
        job.coordinator = first.hello.address
        job.hello.set()
        yield from coordination.responses()

    def ListJobs(
        self, request: management_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListJobsResponse:
        return management_pb2.ListJobsResponse(jobs=self._jobs.describe())

    def CancelJob(
        self, request: management_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CancelJobResponse:
        job = self._jobs.live(request.job)
        if job is None:
            if self._jobs.finished(request.job):
                return management_pb2.CancelJobResponse()
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {request.job!r}")
        job.cancelled = True
        with self._lock:
            coordination = self._coordinations.get(job.name)
        if coordination is not None:
            coordination.cancel()
        elif job.child is not None:
            job.child.terminate()
        return management_pb2.CancelJobResponse()

    def Shutdown(
        self, request: management_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> management_pb2.ShutdownResponse:
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


def _problem(request: management_pb2.CreateJobRequest) -> str:
    """What is wrong with the numbers that a client asks for."""
    for name, value, least, most in (
        ("num_csx", request.num_csx, 1, MAX_WAFERS),
        ("num_workers_per_csx", request.num_workers_per_csx, 1, MAX_WORKERS_PER_WAFER),
        ("run_ahead_steps", request.run_ahead_steps, 0, MAX_RUN_AHEAD_STEPS),
    ):
        if not least <= value <= most:
            return f"{name} must be {least} to {most}, not {value}"
    if ".." in Path(request.compile_dir).parts:
        return f"compile_dir must not contain '..': {request.compile_dir!r}"
    if "\0" in request.compile_dir:
        return "compile_dir must not contain a null character"
    return ""


def _cache_directory(root: Path, compile_dir: str) -> Path:
    return root / compile_dir  # an absolute compile_dir stands for itself

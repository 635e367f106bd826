"""The supervision of jobs: starts, watches, restarts and ends their coordinators, and keeps the streams to them."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.coordinator.record import OrphanedJobs
from appliance.coordinator.settings import TAKEN_STATUS, CoordinatorHome
from appliance.management.coordination import Coordination
from appliance.management.coordinator_process import CoordinatorProcess, IngressProcess, ProcessLost, process_of
from appliance.management.jobs import ENDED, JobEntry, JobTable, TooManyJobs
from appliance.management.nodes.registry import NodeRegistry
from waferbox import deadlines, roles
from waferbox.host.threads import GuardedThread
from waferbox.launch.spawn import SpawnError
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import ingress_pb2, management_pb2

# --- Settings of a management service ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    """The settings of a management service."""

    cache_root: Path  # the artifacts of the compiler are below it
    compile_root: Path | None = None  # scripts may name folders below it; None: below the cache root only
    lease_seconds: float = deadlines.REGISTRATION.lease


# --- Supervision ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

SPAWN_RETRY_SECONDS = 0.2
INGRESS_RETRY_SECONDS = 0.5


class Supervisor:
    """The owner of the jobs, of the registry of nodes, and of the thread that watches both. Thread-safe."""

    def __init__(self, settings: ManagementSettings, on_defect: Callable[[Exception], None]) -> None:
        """on_defect(error): called when a defect has ended the watch; management must end then."""
        self.registry = NodeRegistry(settings.lease_seconds, self._node_lost)
        self.jobs = JobTable()
        self._lease_seconds = settings.lease_seconds
        self._coordinations: dict[str, Coordination] = {}
        self._lock = threading.Lock()
        self._home: CoordinatorHome | None = None
        self._orphaned: OrphanedJobs | None = None
        self._adopting = threading.Lock()  # held while a job is looked up and added
        self._closing = threading.Event()
        self._watch = GuardedThread(self._keep_watch, name="watch", on_defect=on_defect)

    def start(self, home: CoordinatorHome) -> None:
        """Begins. home: for coordinators that no ingress runs, with the address of management."""
        self._home = home
        self.registry.address = home.management
        self._orphaned = OrphanedJobs(home.cache_root, home.management)
        self._adopt_orphans()
        self._watch.start()

    def close(self, *, end_jobs: bool) -> None:
        """Ends the watch. end_jobs: also ends all jobs and their coordinators; otherwise they outlive this service."""
        self._closing.set()
        self._watch.join()
        jobs = self.jobs.all_live()
        if not end_jobs:
            if jobs:
                names = ", ".join(job.name for job in jobs)
                address = self.registry.address
                logger.warning("%s: still running; a management service started at %s takes over", names, address)
            return
        for job in jobs:
            if (process := job.process) is not None:
                process.terminate()
            else:
                self.cancel(job)
        deadline = time.monotonic() + deadlines.END.coordinator
        for job in jobs:
            job.over.wait(max(0.0, deadline - time.monotonic()))
            if (process := job.process) is not None:
                process.close(max(0.0, deadline - time.monotonic()))

    # --- the coordinator's process ------------------------------------------------------------------------------------

    def create(self, request: management_pb2.CreateJobRequest, ingress: str) -> JobEntry:
        """Creates a job and starts its coordinator: at an ingress, or here if that is empty.

        Blocks while a process is started. Raises TooManyJobs; SpawnError, with the job ended.
        """
        job = self.jobs.create(request, lambda name: cluster_secret().token(Kind.JOB, name))
        self.registry.open(job.name)
        try:
            job.process = self._start_coordinator(job, ingress)
        except SpawnError as error:
            self._end(job, management_pb2.JOB_PHASE_FAILED, str(error))
            raise
        self._begin_watch(job, ingress)
        return job

    def _start_coordinator(self, job: JobEntry, ingress: str, *, restarted: bool = False) -> CoordinatorProcess:
        """Starts a coordinator. Raises SpawnError."""
        start = ingress_pb2.RunCoordinatorRequest(
            job=job.name,
            token=job.token,
            created=job.created,
            compile_dir=job.request.compile_dir,
            restarted=restarted,
            may_restart=job.request.max_num_restarts > 0,
        )
        if ingress:
            return IngressProcess(ingress, start)
        assert self._home is not None
        return self._home.start(start)

    def _begin_watch(self, job: JobEntry, ingress: str) -> None:
        """Watches the coordinator of a job, in a thread."""
        GuardedThread(
            lambda: self._watch_coordinators(job, ingress),
            name=f"coordinator-{job.name}",
            on_defect=lambda error: self._watch_failed(job, error),
        ).start()

    def _watch_failed(self, job: JobEntry, error: Exception) -> None:
        """Ends a job that is no longer watched, so that it holds no nodes."""
        if (process := job.process) is not None:
            process.kill()
        self._end(job, management_pb2.JOB_PHASE_FAILED, f"a defect in the management service: {error!r}")

    def _watch_coordinators(self, job: JobEntry, ingress: str) -> None:
        """Watches a job's coordinator and its successors: the end of the last ends the job, whatever it reported."""
        while (process := job.process) is not None:
            try:
                status = process.wait()
            except ProcessLost as error:
                if self._restart_on_ingress(job, ingress):
                    continue
                self._process_lost(job, str(error))
                break
            finally:
                if not self._closing.is_set():
                    process.close()
            coordination = self.coordination_of(job.name)
            if coordination is not None and status == TAKEN_STATUS:
                job.process = None  # an earlier management service had started a successor just before its own end
                break
            if coordination is not None:
                coordination.end()
            how = process.cause or f"its coordinator ended with status {status}"
            if status == 0 or not self._replace_coordinator(job, ingress, how):
                self._process_ended(job, how)
                break

    def _replace_coordinator(self, job: JobEntry, ingress: str, how: str) -> bool:
        """Starts a successor; the job keeps its nodes. False if the job cannot continue."""
        now = time.monotonic()
        job.losses = [*(loss for loss in job.losses if now - loss < deadlines.COORDINATION.losses), now]
        while self._gets_successor(job) and len(job.losses) <= job.request.max_num_restarts:
            job.restarted_at = time.monotonic()  # before the start: hello may arrive at once
            try:
                job.process = self._start_coordinator(job, ingress, restarted=bool(job.coordinator))
            except SpawnError as error:
                logger.warning("the coordinator of %s could not be restarted: %s", job.name, error)
                if time.monotonic() - now > deadlines.COORDINATION.spawn or self._closing.wait(SPAWN_RETRY_SECONDS):
                    break
                continue
            logger.warning("%s: %s; a successor is started", job.name, how)
            return True
        return False

    def _restart_on_ingress(self, job: JobEntry, ingress: str) -> bool:
        """Makes the ingress run the coordinator, if it does not; False if the ingress was away for too long."""
        away_since = job.away_since  # None: the coordinator has a stream, though the connection to the ingress broke
        is_late = away_since is not None and time.monotonic() - away_since > deadlines.COORDINATION.ingress_return
        if is_late or not job.coordinator or not self._gets_successor(job) or self._closing.wait(INGRESS_RETRY_SECONDS):
            return False
        if job.restarted_at is not None:
            job.restarted_at = time.monotonic()
        job.process = self._start_coordinator(job, ingress, restarted=True)
        return True

    def _gets_successor(self, job: JobEntry) -> bool:
        """Whether a coordinator gets a successor when it ends."""
        wanted = job.request.max_num_restarts and not job.cancelled
        return bool(wanted) and job.report.phase not in ENDED and not self._closing.is_set()

    def _process_ended(self, job: JobEntry, how: str) -> None:
        if job.report.phase in ENDED:
            self._end(job, job.report.phase, job.report.message)
        elif job.cancelled:
            self._end(job, management_pb2.JOB_PHASE_CANCELLED, "cancelled")
        else:
            count, seconds = len(job.losses), deadlines.COORDINATION.losses
            losses = f", the last of {count} in {seconds:g} s" if count > 1 else ""
            self._end(job, management_pb2.JOB_PHASE_FAILED, how + losses)

    def _process_lost(self, job: JobEntry, reason: str) -> None:
        """Handles the loss of a process whose coordinator may still run, if it has sent hello."""
        away_since = job.away_since
        is_late = away_since is not None and time.monotonic() - away_since > deadlines.COORDINATION.ingress_return
        if not job.coordinator or is_late:
            self._end(job, management_pb2.JOB_PHASE_FAILED, reason)
        with self._lock:
            job.process = None
            if job.name in self._coordinations:
                return
            job.away_since = time.monotonic()
        self._unwatched(job)

    # --- the coordinator's stream -------------------------------------------------------------------------------------

    def coordination_of(self, job: str) -> Coordination | None:
        """Returns the stream of a job's coordinator, if there is one."""
        with self._lock:
            return self._coordinations.get(job)

    def adopt(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adopts a job of a running coordinator that an earlier management service created. Raises TooManyJobs."""
        job = self._open(hello)
        logger.info("%s is back", job.name)
        if hello.ingress and self._gets_successor(job):
            job.process = self._start_coordinator(job, hello.ingress, restarted=True)
        else:
            job.process = process_of(hello)
        if job.process is not None:
            self._begin_watch(job, hello.ingress)
        return job

    def _open(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adds the job of a hello, with its nodes. Raises TooManyJobs."""
        job = self.jobs.adopt(hello)
        self.registry.open(job.name, hello.nodes)
        job.coordinator = hello.address
        return job

    def _adopt_orphans(self) -> None:
        """Adopts all orphaned jobs that are found now."""
        assert self._orphaned is not None
        for hello in self._orphaned.take(lambda name: self.jobs.find(name) is not None):
            try:
                self.adopt_orphaned(hello)
            except TooManyJobs as error:
                logger.warning("%s is given up: %s", hello.job, error)

    def adopt_orphaned(self, hello: management_pb2.CoordinatorHello) -> None:
        """Adopts a job whose coordinator has ended without a successor; no effect if the job is known.

        hello: the last that its coordinator recorded. Blocks while a process is started. Raises TooManyJobs.
        """
        with self._adopting:
            if self.jobs.find(hello.job) is not None:
                return
            hello.token = cluster_secret().token(Kind.JOB, hello.job)
            job = self._open(hello)
        how = "its coordinator had ended, and the management service before this one with it"
        if self._replace_coordinator(job, hello.ingress, how):
            self._begin_watch(job, hello.ingress)
        else:
            self._process_ended(job, how)

    def attach(self, job: JobEntry, address: str, coordination: Coordination) -> None:
        """Attaches a new stream of a job's coordinator, which listens at this address."""
        with self._lock:
            former = self._coordinations.get(job.name)  # a broken stream may not have ended yet
            self._coordinations[job.name] = coordination
            job.away_since = job.restarted_at = None
        if former is not None:
            former.end()
        job.coordinator = address
        job.started_or_over.notify()
        if job.cancelled:
            coordination.cancel()

    def detach(self, job: JobEntry, coordination: Coordination) -> None:
        """Detaches a stream that has ended; no effect if the coordinator has opened another."""
        coordination.end()
        with self._lock:
            if self._coordinations.get(job.name) is not coordination:
                return
            del self._coordinations[job.name]
            job.away_since = time.monotonic()
            if job.process is not None:
                return  # the process is watched: it reconnects or ends
        self._unwatched(job)

    def _unwatched(self, job: JobEntry) -> None:
        """Ends the job of a lost coordinator at once if it had reported the end; otherwise it has time to reconnect."""
        if job.report.phase in ENDED:
            self._end(job, job.report.phase, job.report.message)

    def send_request(self, job: JobEntry) -> None:
        """Sends the changed job to its coordinator, which passes it on to a restarted management service."""
        coordination = self.coordination_of(job.name)
        if coordination is not None:
            coordination.changed()

    # --- the end ------------------------------------------------------------------------------------------------------

    def cancel(self, job: JobEntry) -> None:
        """Cancels a job. May block for a call to an ingress."""
        job.cancelled = True
        coordination = self.coordination_of(job.name)
        if coordination is not None:
            coordination.cancel()
        elif (process := job.process) is not None:
            process.terminate()

    def _end(self, job: JobEntry, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        report = management_pb2.JobReport()
        report.CopyFrom(job.report)
        report.phase, report.message = phase, message
        job.nodes = job.nodes or self.registry.held(job.name)
        if self.jobs.end(job, report):
            self.registry.release(job.name)
            job.over.set()
            job.started_or_over.notify()

    # --- time ---------------------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        while not self._closing.wait(self._lease_seconds / 10):
            for node_id in self.registry.expire():
                logger.warning("%s has sent nothing for %g s: removed", node_id, self._lease_seconds)
            self.registry.review()
            self._adopt_orphans()
            for job in self.jobs.all_live():
                self._end_if_it_hangs(job)
                away_since = job.away_since if job.process is None else None
                if away_since is not None and time.monotonic() - away_since > deadlines.COORDINATION.coordinator_return:
                    self._end(job, management_pb2.JOB_PHASE_FAILED, "its coordinator has died")

    def _end_if_it_hangs(self, job: JobEntry) -> None:
        restarted_at, process = job.restarted_at, job.process
        if (
            restarted_at is not None
            and process is not None
            and time.monotonic() - restarted_at > deadlines.COORDINATION.restarted_hello
        ):
            logger.warning("the restarted coordinator of %s sends no hello: it is killed", job.name)
            job.restarted_at = None
            process.kill()

    def _node_lost(self, node: management_pb2.NodeInfo, reason: str) -> None:
        module = roles.role_of(node.role).module
        logger.info("%s (%s), which works for %s, is lost: %s", node.node_id, module, node.job, reason)
        coordination = self.coordination_of(node.job)
        if coordination is not None:
            coordination.lost(node)

"""The supervision of all jobs, and of the nodes, by one event loop."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom

from appliance.coordinator.processes import CoordinatorProcesses
from appliance.coordinator.record import Orphans
from appliance.management.coordination import Coordination
from appliance.management.jobs import JobEntry, JobTable, TooManyJobs
from appliance.management.nodes.registry import NodeRegistry
from appliance.management.supervision import Connected, Disconnected, Supervision
from waferbox import deadlines, roles, settings
from waferbox.host.clock import Clock, SystemClock, seconds_since_1970
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    """The settings of a management service."""

    cache_root: Path  # the artifacts of the compiler are below it
    compile_root: Path | None = None  # scripts may name folders below it; None: below the cache root only
    lease_seconds: float = deadlines.REGISTRATION.lease
    idle_seconds: float = settings.IDLE_SECONDS.default  # a job that is idle for so long is preempted if others wait


class Supervisor:
    """The owner of the jobs and of the registry of nodes. Used in one event loop; it never blocks it."""

    def __init__(
        self,
        settings: ManagementSettings,
        on_job_ended: Callable[[JobEntry], None],
        on_defect: Callable[[Exception], None],
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Makes a supervisor without nodes and jobs.

        Args:
            settings: of management.
            on_job_ended: called with each job that has ended.
            on_defect: called with an unexpected exception of a task; management must end then.
            clock: of this process.
            random: draws the names of jobs. By default they cannot be guessed.
        """
        self._clock = clock or SystemClock()
        self._random = random or SystemRandom()
        self.registry = NodeRegistry(settings.lease_seconds, self._clock, self._node_lost)
        self.jobs = JobTable(self._clock)
        self._lease_seconds = settings.lease_seconds
        self._idle_seconds = settings.idle_seconds
        self._on_job_ended = on_job_ended
        self._on_defect = on_defect
        self._supervisions: dict[str, Supervision] = {}  # of live jobs
        self._processes: CoordinatorProcesses | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._forgetting: set[asyncio.Task[None]] = set()

    def start(self, address: str, processes: CoordinatorProcesses, orphans: Orphans) -> None:
        """Begins to supervise.

        Args:
            address: of management, for messages.
            processes: the control of the coordinators' processes.
            orphans: jobs to be taken over.
        """
        self.registry.address = address
        self._processes = processes
        self._ticking = asyncio.create_task(self._tick(orphans))
        self._ticking.add_done_callback(self._ticking_ended)

    async def close(self, *, end_jobs: bool) -> None:
        """Ends the supervision. end_jobs: also ends all jobs; otherwise they outlive this service."""
        if self._ticking is not None:
            self._ticking.cancel()
        supervisions = list(self._supervisions.values())
        if end_jobs:
            await asyncio.gather(*(supervision.close() for supervision in supervisions))
            for supervision in supervisions:
                self._forget(supervision.job)
            await asyncio.gather(*self._forgetting)
            return
        for supervision in supervisions:
            supervision.leave()
        if supervisions:
            names = ", ".join(supervision.job.name for supervision in supervisions)
            address = self.registry.address
            logger.warning("%s: still running; a management service started at %s takes over", names, address)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def create(self, request: management_pb2.CreateJobRequest, ingress: str) -> JobEntry:
        """Creates a job and requests its coordinator: at an ingress, or here if that is empty. Raises TooManyJobs."""
        name = self._new_name()
        job = self.jobs.create(name, request, cluster_secret().token(Kind.JOB, name))
        self.registry.open(job.name)
        self._supervise(job, ingress).start()
        return job

    def adopt(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adopts a job of a running coordinator that an earlier management service created. Raises TooManyJobs."""
        assert self._processes is not None
        job = self._open(hello)
        logger.info("%s is back", job.name)
        self._supervise(job, hello.ingress).take(self._processes.find(hello))
        return job

    def adopt_orphan(self, hello: management_pb2.CoordinatorHello) -> None:
        """Adopts a job whose coordinator has ended without a successor; no effect if the job is known.

        hello: the last that its coordinator recorded. Raises TooManyJobs.
        """
        if self.jobs.find(hello.job) is not None:
            return
        hello.token = cluster_secret().token(Kind.JOB, hello.job)
        job = self._open(hello)
        how = "its coordinator had ended, and the management service before this one with it"
        self._supervise(job, hello.ingress).restart(how)

    def cancel(self, job: JobEntry, cause: str = "", *, is_error: bool = False) -> None:
        """Cancels a job. cause: for the user; empty: by a command. is_error: the cause is the script's exception."""
        if (supervision := self._supervisions.get(job.name)) is not None:
            supervision.cancel(cause, is_error=is_error)

    def give_up(self, job: JobEntry) -> None:
        """Ends a job whose first coordinator does not connect."""
        if (supervision := self._supervisions.get(job.name)) is not None:
            supervision.give_up()

    def _new_name(self) -> str:
        while self.jobs.find(name := f"job-{self._random.getrandbits(32):08x}") is not None:
            pass
        return name

    def _open(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adds the job of a hello, with its nodes. Raises TooManyJobs."""
        job = self.jobs.adopt(hello)
        self.registry.open(job.name, hello.nodes)
        return job

    def _supervise(self, job: JobEntry, ingress: str) -> Supervision:
        assert self._processes is not None
        supervision = Supervision(job, ingress, self._processes, self._clock, self._ended)
        self._supervisions[job.name] = supervision
        return supervision

    def _ended(self, job: JobEntry, report: management_pb2.JobReport) -> None:
        job.nodes = job.nodes or self.registry.held(job.name)
        del self._supervisions[job.name]
        self.jobs.end(job, report)
        self.registry.release(job.name)
        self._forget(job)
        self._on_job_ended(job)

    def _forget(self, job: JobEntry) -> None:
        """Removes what is left of a job that has ended on this host."""
        assert self._processes is not None
        task = asyncio.create_task(self._processes.forget(job.name))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    # --- the coordinators' streams ------------------------------------------------------------------------------------

    def coordination_of(self, job: str) -> Coordination | None:
        """Returns the stream of a job's coordinator, if there is one."""
        supervision = self._supervisions.get(job)
        return None if supervision is None else supervision.stream

    def attach(self, job: JobEntry, address: str) -> Coordination:
        """Attaches a new stream of a live job's coordinator, which listens at this address."""
        coordination = Coordination(job, self.jobs, self.registry, self._clock)
        self._supervisions[job.name].handle(Connected(coordination, address))
        return coordination

    def detach(self, job: JobEntry, coordination: Coordination) -> None:
        """Detaches a stream that has ended."""
        coordination.end()
        if (supervision := self._supervisions.get(job.name)) is not None:
            supervision.handle(Disconnected(coordination))

    def send_request(self, job: JobEntry) -> None:
        """Sends the changed job to its coordinator, which passes it on to a restarted management service."""
        if (coordination := self.coordination_of(job.name)) is not None:
            coordination.changed()

    def _node_lost(self, node: management_pb2.NodeInfo, reason: str) -> None:
        module = roles.role_of(node.role).module
        logger.info("%s (%s), which works for %s, is lost: %s", node.node_id, module, node.job, reason)
        if (coordination := self.coordination_of(node.job)) is not None:
            coordination.lost(node)

    # --- time ---------------------------------------------------------------------------------------------------------

    async def _tick(self, orphans: Orphans) -> None:
        while True:
            if orphans:
                known = [job.name for job in self.jobs.all()]
                for hello in await asyncio.to_thread(orphans.take, known):
                    try:
                        self.adopt_orphan(hello)
                    except TooManyJobs as error:
                        logger.warning("%s is given up: %s", hello.job, error)
            await asyncio.sleep(self._lease_seconds / 10)
            for node_id in self.registry.expire():
                logger.warning("%s has sent nothing for %g s: removed", node_id, self._lease_seconds)
            self.registry.review()
            self._preempt_idle()

    def _preempt_idle(self) -> None:
        """Requests the nodes of jobs that have been idle for long, for jobs that wait."""
        before = seconds_since_1970(self._clock) - self._idle_seconds
        idle = [job for job in self.jobs.all_live() if 0.0 < job.idle_since <= before]
        if not idle:
            return
        longest_first = sorted(idle, key=lambda job: job.idle_since)
        for name in self.registry.to_preempt([job.name for job in longest_first]):
            if (coordination := self.coordination_of(name)) is not None:
                coordination.preempt()

    def _ticking_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            logger.error("A defect in the supervision of nodes", exc_info=error)
            self._on_defect(error)

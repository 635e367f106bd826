"""The jobs of a management service: live ones, and the last that ended."""

import collections
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.changes import Changes
from appliance.job_history import JobHistory
from appliance.management.coordinator_process import CoordinatorProcess
from wsc.v1 import management_pb2

MAX_LIVE = 1024
MAX_FINISHED = 100

ENDED = frozenset(
    {management_pb2.JOB_PHASE_SUCCEEDED, management_pb2.JOB_PHASE_FAILED, management_pb2.JOB_PHASE_CANCELLED}
)


@dataclass(slots=True, kw_only=True, eq=False)
class JobEntry:
    """A job as management sees it. Each field has one writer at a time: the service, or the job's coordination."""

    name: str
    request: management_pb2.CreateJobRequest
    token: str  # shown by the coordinator to management, and by the client to the coordinator
    created: float = field(default_factory=time.time)  # this and the next two: seconds since 1970
    started: float = 0.0  # 0: no nodes yet
    ended: float = 0.0  # 0: it is live
    coordinator: str = ""  # its address, after its hello
    process: CoordinatorProcess | None = None  # the coordinator's, if known
    report: management_pb2.JobReport = field(
        default_factory=lambda: management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
    )
    nodes: Sequence[management_pb2.NodeInfo] = ()  # granted to it
    cancelled: bool = False
    losses: list[float] = field(default_factory=list)  # monotonic: unexpected ends of its coordinators
    away_since: float | None = None  # monotonic: end of the coordinator's last stream; None: it has one
    restarted_at: float | None = None  # monotonic: last restart of the coordinator, until its hello
    history: JobHistory = field(default_factory=JobHistory)
    started_or_over: Changes = field(default_factory=Changes)  # changes of `coordinator` and `over`
    over: threading.Event = field(default_factory=threading.Event)

    def describe(
        self, status: management_pb2.QueueStatus, held: Callable[[str], Sequence[management_pb2.NodeInfo]]
    ) -> management_pb2.JobInfo:
        """Describes the job. status: its position in the queue. held: returns the nodes that a job leases."""
        request = self.request
        return management_pb2.JobInfo(
            job=self.name,
            phase=self.report.phase,
            message=self.report.message,
            age_seconds=max(0.0, (self.ended or time.time()) - self.created),
            labels=request.labels,
            step=self.report.step,
            num_steps=self.report.num_steps,
            coordinator="" if self.ended else self.coordinator,
            user=request.user,
            host=request.host,
            priority=request.priority,
            num_csx=request.num_csx,
            nodes=self.nodes or held(self.name),
            queue_position=status.position,
            waiting_for=status.waiting_for,
            created=self.created,
            started=self.started,
            ended=self.ended,
            restarts=self.report.restarts,
            num_restarts=self.report.num_restarts,
        )

    def label(self, add: Sequence[str], remove: Sequence[str]) -> None:
        """Changes labels. add: "key=value", each replaces the label with its key; remove: keys."""
        labels = {label.partition("=")[0]: label for label in self.request.labels}
        for key in remove:
            labels.pop(key, None)
        labels.update((label.partition("=")[0], label) for label in add)
        del self.request.labels[:]
        self.request.labels.extend(labels.values())


class TooManyJobs(RuntimeError):
    """Raised when there are as many jobs as a cluster may have."""


class JobTable:
    """The jobs of a management service: live ones, and the last that ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, JobEntry] = {}
        self._finished: collections.deque[JobEntry] = collections.deque(maxlen=MAX_FINISHED)

    def create(self, request: management_pb2.CreateJobRequest, token: Callable[[str], str]) -> JobEntry:
        """Adds a job with a fresh name. Raises TooManyJobs.

        make_token: returns the token of a job by its name.
        """
        with self._lock:
            self._check_room()
            name = f"job-{secrets.token_hex(4)}"
            while name in self._live:
                name = f"job-{secrets.token_hex(4)}"
            job = JobEntry(name=name, request=request, token=token(name))
            self._live[name] = job
        return job

    def adopt(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adds a job that an earlier management service created; returns the existing entry if there is one.

        Raises:
            TooManyJobs: there are as many jobs as a cluster may have.
        """
        with self._lock:
            self._check_room()
            job = JobEntry(
                name=hello.job,
                request=hello.request,
                token=hello.token,
                created=hello.created,
                started=hello.started,
                report=hello.report,
            )
            return self._live.setdefault(hello.job, job)

    def live(self, name: str) -> JobEntry | None:
        """Returns the job if it is live."""
        with self._lock:
            return self._live.get(name)

    def find(self, name: str) -> JobEntry | None:
        """Returns the job if it is live or ended recently."""
        with self._lock:
            finished = (job for job in self._finished if job.name == name)
            return self._live.get(name) or next(finished, None)

    def end(self, job: JobEntry, report: management_pb2.JobReport) -> bool:
        """Ends a job; False, without effect, if it had ended."""
        with self._lock:
            if self._live.pop(job.name, None) is None:
                return False
            job.report = report
            job.ended = time.time()
            self._finished.append(job)
        job.history.end(report)
        return True

    def all_live(self) -> Sequence[JobEntry]:
        with self._lock:
            return list(self._live.values())

    def all(self) -> Sequence[JobEntry]:
        """Returns live jobs, then ended ones, each newest first."""
        with self._lock:
            return [*reversed(self._live.values()), *reversed(self._finished)]

    def _check_room(self) -> None:
        if len(self._live) >= MAX_LIVE:
            raise TooManyJobs(
                f"the cluster has {MAX_LIVE} jobs that run or wait, which is as many as it may have: wait until one "
                "ends, or cancel one"
            )

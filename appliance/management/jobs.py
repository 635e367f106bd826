"""The jobs of a management service: live ones, and the last that ended."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.job_history import JobHistory
from appliance.management.pace import Pace
from waferbox.host.clock import Clock, seconds_since_1970
from waferbox.host.event_loop import Changes
from wsc.v1 import management_pb2

MAX_LIVE = 1024
MAX_FINISHED = 100

ENDED = frozenset(
    {management_pb2.JOB_PHASE_SUCCEEDED, management_pb2.JOB_PHASE_FAILED, management_pb2.JOB_PHASE_CANCELLED}
)


@dataclass(slots=True, kw_only=True, eq=False)
class JobEntry:
    """A job as management sees it."""

    name: str
    request: management_pb2.CreateJobRequest
    token: str  # shown by the coordinator to management, and by the client to the coordinator
    created: float  # this and the next four: in seconds since 1970
    started: float = 0.0  # 0: no nodes yet
    admitted: float = 0.0  # the last time: an idle job may give back all its nodes, and get others
    ended: float = 0.0  # 0: it is live
    idle_since: float = 0.0  # 0: it is not between executions
    coordinator: str = ""  # its address, after its hello
    report: management_pb2.JobReport = field(
        default_factory=lambda: management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
    )
    nodes: Sequence[management_pb2.NodeInfo] = ()  # granted to it
    cancelled: bool = False
    pace: Pace = field(default_factory=Pace)
    history: JobHistory = field(default_factory=JobHistory)
    changes: Changes = field(default_factory=Changes)  # of `coordinator` and `ended`

    def take(self, report: management_pb2.JobReport, now: float) -> None:
        """Takes a report of the coordinator. now: seconds since 1970."""
        is_idle = report.phase == management_pb2.JOB_PHASE_IDLE
        self.idle_since = (self.idle_since or now) if is_idle else 0.0
        self.report = report

    def describe(
        self, now: float, status: management_pb2.QueueStatus, held: Sequence[management_pb2.NodeInfo]
    ) -> management_pb2.JobInfo:
        """Describes the job. now: seconds since 1970. status: its position in the queue. held: the nodes it leases."""
        request = self.request
        return management_pb2.JobInfo(
            job=self.name,
            phase=self.report.phase,
            message=self.report.message,
            age_seconds=max(0.0, (self.ended or now) - self.created),
            labels=request.labels,
            step=self.report.step,
            num_steps=self.report.num_steps,
            coordinator="" if self.ended else self.coordinator,
            user=request.user,
            host=request.host,
            priority=request.priority,
            num_csx=request.num_csx,
            nodes=self.nodes or held,
            queue_position=status.position,
            waiting_for=status.waiting_for,
            created=self.created,
            started=self.started,
            ended=self.ended,
            restarts=self.report.restarts,
            num_restarts=self.report.num_restarts,
            idle_since=0.0 if self.ended else self.idle_since,
            holders=status.holders,
            command=request.command,
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
    """The jobs of a management service: live ones, and the last that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[str, JobEntry] = {}
        self._finished: collections.deque[JobEntry] = collections.deque(maxlen=MAX_FINISHED)

    def create(self, name: str, request: management_pb2.CreateJobRequest, token: str) -> JobEntry:
        """Adds a job with a fresh name, and its token. Raises TooManyJobs."""
        assert name not in self._live
        self._check_room()
        job = JobEntry(name=name, request=request, token=token, created=seconds_since_1970(self._clock))
        self._live[name] = job
        return job

    def adopt(self, hello: management_pb2.CoordinatorHello) -> JobEntry:
        """Adds a job that an earlier management service created. Raises TooManyJobs."""
        assert hello.job not in self._live
        self._check_room()
        job = JobEntry(
            name=hello.job,
            request=hello.request,
            token=hello.token,
            created=hello.created,
            started=hello.started,
            coordinator=hello.address,
            report=hello.report,
        )
        self._live[job.name] = job
        return job

    def live(self, name: str) -> JobEntry | None:
        """Returns the job if it is live."""
        return self._live.get(name)

    def find(self, name: str) -> JobEntry | None:
        """Returns the job if it is live or ended recently."""
        finished = (job for job in self._finished if job.name == name)
        return self._live.get(name) or next(finished, None)

    def end(self, job: JobEntry, report: management_pb2.JobReport) -> None:
        """Ends a live job."""
        del self._live[job.name]
        job.report = report
        job.ended = seconds_since_1970(self._clock)
        self._finished.append(job)
        job.history.end(report)
        job.changes.notify()

    def with_holders(self, status: management_pb2.QueueStatus) -> management_pb2.QueueStatus:
        """Returns the status with a description of the jobs that hold nodes."""
        described = management_pb2.QueueStatus()
        described.CopyFrom(status)
        for holder in described.holders:
            if (job := self._live.get(holder.job)) is not None:
                since = job.admitted or job.started  # of a job that is older than this service only the first is known
                holder.user, holder.since, holder.idle_since = job.request.user, since, job.idle_since
        return described

    def all_live(self) -> Sequence[JobEntry]:
        return list(self._live.values())

    def all(self) -> Sequence[JobEntry]:
        """Returns live jobs, then ended ones, each newest first."""
        return [*reversed(self._live.values()), *reversed(self._finished)]

    def _check_room(self) -> None:
        if len(self._live) >= MAX_LIVE:
            raise TooManyJobs(
                f"the cluster has {MAX_LIVE} jobs that run or wait, which is as many as it may have: wait until one "
                "ends, or cancel one"
            )

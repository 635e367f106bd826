"""The jobs that management knows: those under way, and the last ones that ended."""

import collections
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from interconnect.zygote import Child
from wsc.v1 import management_pb2

MAX_FINISHED = 100

ENDED = frozenset(
    {management_pb2.JOB_PHASE_SUCCEEDED, management_pb2.JOB_PHASE_FAILED, management_pb2.JOB_PHASE_CANCELLED}
)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job. Its fields are changed by JobTable's owner under `lock`."""

    name: str
    request: management_pb2.CreateJobRequest
    token: str  # what the coordinator shows us, and the client shows the coordinator
    created: float = field(default_factory=time.monotonic)
    coordinator: str = ""  # its address, once it has said hello
    child: Child | None = None
    report: management_pb2.JobReport = field(
        default_factory=lambda: management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
    )
    cancelled: bool = False
    ended: float | None = None
    hello: threading.Event = field(default_factory=threading.Event)  # set too when the coordinator dies before it

    def describe(self) -> management_pb2.JobInfo:
        end = self.ended if self.ended is not None else time.monotonic()
        return management_pb2.JobInfo(
            job=self.name,
            phase=self.report.phase,
            message=self.report.message,
            age_seconds=end - self.created,
            labels=self.request.labels,
            step=self.report.step,
            num_steps=self.report.num_steps,
            coordinator="" if self.ended is not None else self.coordinator,
        )


class JobTable:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Job] = {}
        self._finished: collections.deque[Job] = collections.deque(maxlen=MAX_FINISHED)

    def create(self, request: management_pb2.CreateJobRequest) -> Job:
        """A job with a fresh name and token."""
        with self._lock:
            name = f"job-{secrets.token_hex(4)}"
            while name in self._live:
                name = f"job-{secrets.token_hex(4)}"
            job = Job(name=name, request=request, token=secrets.token_hex(16))
            self._live[name] = job
        return job

    def live(self, name: str) -> Job | None:
        """The job, if it has not ended."""
        with self._lock:
            return self._live.get(name)

    def finished(self, name: str) -> bool:
        """Whether a job of this name ended not long ago."""
        with self._lock:
            return any(job.name == name for job in self._finished)

    def end(self, job: Job, report: management_pb2.JobReport) -> None:
        """The job is over; no effect if it was already."""
        with self._lock:
            if self._live.pop(job.name, None) is None:
                return
            job.report = report
            job.ended = time.monotonic()
            self._finished.append(job)

    def all_live(self) -> Sequence[Job]:
        with self._lock:
            return list(self._live.values())

    def describe(self) -> Sequence[management_pb2.JobInfo]:
        """Newest first, those under way before those that ended."""
        with self._lock:
            return [job.describe() for job in [*reversed(self._live.values()), *reversed(self._finished)]]

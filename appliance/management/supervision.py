"""The supervision of one job: a state machine that follows the coordinator's process and its stream.

The process and the stream are two signs of the same coordinator, and each may be missing: a process that an earlier
management service started is unknown, and a stream breaks when either side is cut off. The end of a process is certain,
the end of a stream is not: so a coordinator with a known process gets a successor only when that has ended, and one
without gets time to connect again.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from appliance.coordinator.processes import SPAWN_RETRY_SECONDS, CoordinatorProcess, CoordinatorProcesses, ProcessLost
from appliance.coordinator.settings import CUT_OFF_STATUS, TAKEN_STATUS
from appliance.management.coordination import Coordination
from appliance.management.jobs import ENDED, JobEntry
from waferbox import deadlines
from waferbox.host.clock import Clock
from waferbox.launch.spawn import SpawnError
from wsc.v1 import ingress_pb2, management_pb2

logger = logging.getLogger(__name__)

INGRESS_RETRY_SECONDS: Final = 0.5
CLUSTER_ENDS: Final = "its cluster went down: start the cluster again, then the script from its last checkpoint"

# --- States and events ------------------------------------------------------------------------------------------------


class CoordinatorState(enum.Enum):
    """What management knows of a job's coordinator."""

    STARTING = "a process is requested; it may have its stream already"
    EXPECTED = "the process runs, and has no stream"
    CONNECTED = "the process runs, and has a stream"
    UNKNOWN = "there is a stream; the process is not known"
    AWAY = "there is neither, but the coordinator may connect again"
    OVER = "the job has ended"


S = CoordinatorState


@dataclass(frozen=True, slots=True)
class Started:
    """A requested process runs."""

    process: CoordinatorProcess


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A requested process could not be started."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has ended. how: for the user."""

    process: CoordinatorProcess
    status: int
    how: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A process may run or have ended, since the ingress that ran it cannot be reached."""

    process: CoordinatorProcess
    reason: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator has opened a stream, and listens at this address."""

    stream: Coordination
    address: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A stream has ended."""

    stream: Coordination


@dataclass(frozen=True, slots=True)
class TimeOver:
    """The time for the coordinator's next sign is over."""


Event: TypeAlias = Started | StartFailed | Exited | Lost | Connected | Disconnected | TimeOver

# --- The state machine ------------------------------------------------------------------------------------------------


class Supervision:
    """The supervision of one job.

    Events come from the tasks that start a process and wait for its end, from the coordinator's streams, and from one
    timer. `TRANSITIONS` has the events that each state handles; others have no effect.
    """

    def __init__(
        self,
        job: JobEntry,
        ingress: str,
        processes: CoordinatorProcesses,
        clock: Clock,
        on_end: Callable[[JobEntry, management_pb2.JobReport], None],
    ) -> None:
        """Makes the supervision of a coordinator that is away; `start`, `restart` or `take` follows.

        Args:
            job: the job.
            ingress: address of the ingress that runs its coordinators; empty: they run here.
            processes: the control of the coordinators' processes.
            clock: of this process.
            on_end: called once, with the last report, when the job has ended.
        """
        self.job = job
        self.state = S.AWAY
        self.stream: Coordination | None = None
        self._ingress = ingress
        self._processes = processes
        self._clock = clock
        self._on_end = on_end
        self._process: CoordinatorProcess | None = None
        self._losses: list[float] = []  # times of unexpected ends of coordinators
        self._how = ""  # the last of these ended
        self._away_since = clock.monotonic()  # time of the end of the last stream, if there is none
        self._start_before = 0.0  # until then a failed start is repeated
        self._is_restarted = False  # whether the process that is requested replaces another
        self._timer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    # --- commands -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the first coordinator of a new job."""
        self._request_process(restarted=False)

    def restart(self, how: str) -> None:
        """Starts a successor of a coordinator that has ended. how: for the user."""
        self._replace(how)

    def take(self, process: CoordinatorProcess | None) -> None:
        """Supervises a coordinator that an earlier management service started; its stream follows."""
        if self._ingress:
            self._request_process(restarted=True)  # the ingress runs it, or starts a successor
        elif process is not None:
            self.handle(Started(process))
        else:
            self._set_timer(deadlines.COORDINATION.coordinator_return)

    def cancel(self, cause: str = "", *, is_error: bool = False) -> None:
        """Ends the job. cause: for the user; empty: by a command. is_error: the cause is the script's exception."""
        self.job.cancelled = True
        if self.stream is not None:
            self.stream.cancel(cause, is_error=is_error)
        elif self._process is not None:
            self._process.terminate()

    def give_up(self) -> None:
        """Ends the coordinator at once, which does not answer; it gets no successor."""
        self.job.cancelled = True
        if self._process is not None:
            self._process.kill()

    def leave(self) -> None:
        """Ends the supervision; the coordinator outlives it."""
        self._is_closing = True
        self._stop_timer()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends the coordinator and the job."""
        self._is_closing = True  # no successor
        if self.stream is not None:
            self.stream.cancel(CLUSTER_ENDS)
        else:
            self.cancel()
        seconds = deadlines.END.coordinator
        await self.job.changes.until(lambda: self.job.ended, seconds)
        if self._process is not None:
            await self._process.close(0.0)
        self.leave()

    def handle(self, event: Event) -> None:
        """Changes the state after an event; an event that the state does not handle has no effect."""
        transition = TRANSITIONS[self.state].get(type(event))
        if transition is not None:
            before = self.state
            transition(self, event)
            logger.debug("%s: %s, then %s: %s", self.job.name, before.name, type(event).__name__, self.state.name)

    # --- transitions --------------------------------------------------------------------------------------------------

    def _started(self, event: Started) -> None:
        self._process = event.process
        self._run(self._wait_for(event.process))
        self._follow_signs()
        if self.job.cancelled and self.stream is None:
            event.process.terminate()

    def _started_too_late(self, event: Started) -> None:
        event.process.kill()
        self._run(self._wait_for(event.process))

    def _start_failed(self, event: StartFailed) -> None:
        logger.warning("the coordinator of %s could not be started: %s", self.job.name, event.reason)
        if not self._losses:
            self._end(management_pb2.JOB_PHASE_FAILED, event.reason)
        elif not self._gets_successor() or self._clock.monotonic() > self._start_before:
            self._end_without_successor()
        else:
            self._request_process(restarted=self._is_restarted, after=SPAWN_RETRY_SECONDS)

    def _exited(self, event: Exited) -> None:
        assert event.process is self._process
        self._process = None
        if self.stream is not None and event.status == TAKEN_STATUS:
            # The earlier management service had started a successor just before its own end, which has the job.
            self._follow_signs()
            return
        if self.stream is not None:
            self.stream.end()
            self._drop_stream()
        if event.status == CUT_OFF_STATUS and self._is_closing and self.job.report.phase not in ENDED:
            # A cluster of the script's own ends with it, while the coordinator finds the script's end.
            pid = self.job.request.process_id
            script = f"the script (pid {pid})" if pid else "the script"
            how = f"{script} has ended, or its connection broke, and its cluster went down"
            self._end(management_pb2.JOB_PHASE_CANCELLED, how)
        elif event.status:
            self._replace(event.how)
        else:
            self._how = event.how
            self._end_without_successor()

    def _lost(self, event: Lost) -> None:
        assert event.process is self._process
        self._process = None
        times = deadlines.COORDINATION
        patience = times.ingress_return if self._gets_successor() else times.coordinator_return
        is_late = self.stream is None and self._is_away_for(patience)
        if self.job.report.phase in ENDED or self._is_closing:
            self._follow_signs()
        elif not self.job.coordinator or is_late:
            self._end(management_pb2.JOB_PHASE_FAILED, event.reason)
        else:
            self._request_process(restarted=True, after=INGRESS_RETRY_SECONDS)

    def _connected(self, event: Connected) -> None:
        former, self.stream = self.stream, event.stream
        if former is not None:
            former.end()  # it has broken, and its end has not been noticed yet
        self.job.coordinator = event.address
        self.job.changes.notify()
        if self.job.cancelled:
            event.stream.cancel()
        if self.state is not S.STARTING:
            self._follow_signs()

    def _disconnected(self, event: Disconnected) -> None:
        if event.stream is not self.stream:
            return  # the coordinator has opened another
        self._drop_stream()
        if self.state is not S.STARTING:
            self._follow_signs()

    def _hangs(self, event: TimeOver) -> None:
        assert self._process is not None
        logger.warning("the coordinator of %s runs, and does not connect: it is killed", self.job.name)
        self._process.kill()

    def _stayed_away(self, event: TimeOver) -> None:
        seconds = deadlines.COORDINATION.coordinator_return
        self._end(management_pb2.JOB_PHASE_FAILED, f"its coordinator has not connected again within {seconds:g} s")

    # --- parts of transitions -----------------------------------------------------------------------------------------

    def _follow_signs(self) -> None:
        """Enters the state that follows from the process and the stream."""
        self._stop_timer()
        if self._process is not None and self.stream is not None:
            self.state = S.CONNECTED
        elif self._process is not None:
            self.state = S.EXPECTED
            first, later = deadlines.JOB_CREATION.coordinator, deadlines.COORDINATION.hello
            self._set_timer(later if self.job.coordinator else first)
        elif self.stream is not None:
            self.state = S.UNKNOWN
        elif self.job.report.phase in ENDED:
            self._end(self.job.report.phase, self.job.report.message)
        else:
            self.state = S.AWAY
            self._set_timer(deadlines.COORDINATION.coordinator_return)

    def _drop_stream(self) -> None:
        self.stream = None
        self._away_since = self._clock.monotonic()

    def _is_away_for(self, seconds: float) -> bool:
        return self._clock.monotonic() - self._away_since > seconds

    def _gets_successor(self) -> bool:
        """Whether a coordinator gets a successor when it ends."""
        wanted = self.job.request.max_num_restarts and not self.job.cancelled
        return bool(wanted) and self.job.report.phase not in ENDED and not self._is_closing

    def _replace(self, how: str) -> None:
        """Starts a successor, which gets the nodes; or ends the job. how: the former coordinator ended."""
        now = self._clock.monotonic()
        self._how = how
        self._losses = [*(loss for loss in self._losses if now - loss < deadlines.COORDINATION.losses), now]
        if not self._gets_successor() or len(self._losses) > self.job.request.max_num_restarts:
            self._end_without_successor()
            return
        self._start_before = now + deadlines.COORDINATION.spawn
        logger.warning("%s: %s; a successor is started", self.job.name, how)
        # Before its hello, the job has no record from which a successor could take it over.
        self._request_process(restarted=bool(self.job.coordinator))

    def _request_process(self, *, restarted: bool, after: float = 0.0) -> None:
        self.state, self._is_restarted = S.STARTING, restarted
        self._stop_timer()
        job = self.job
        request = ingress_pb2.RunCoordinatorRequest(
            job=job.name,
            token=job.token,
            created=job.created,
            compile_dir=job.request.compile_dir,
            restarted=restarted,
            may_restart=job.request.max_num_restarts > 0,
            only_await=restarted and not self._gets_successor(),
        )
        self._run(self._start_process(request, after))

    async def _start_process(self, request: ingress_pb2.RunCoordinatorRequest, after: float) -> None:
        await asyncio.sleep(after)
        try:
            process = await self._processes.start(request, self._ingress)
        except SpawnError as error:
            self.handle(StartFailed(str(error)))
        else:
            self.handle(Started(process))

    async def _wait_for(self, process: CoordinatorProcess) -> None:
        try:
            status = await process.wait()
        except ProcessLost as error:
            event: Event = Lost(process, str(error))
        else:
            is_cut_off = status == CUT_OFF_STATUS
            how = "the connection to its script broke" if is_cut_off else f"its coordinator ended with status {status}"
            event = Exited(process, status, process.cause or how)
        await process.close(0.0)
        self.handle(event)

    def _end_without_successor(self) -> None:
        job = self.job
        if job.report.phase in ENDED:
            self._end(job.report.phase, job.report.message)
        elif job.cancelled:
            self._end(management_pb2.JOB_PHASE_CANCELLED, "cancelled")
        else:
            count, seconds = len(self._losses), deadlines.COORDINATION.losses
            losses = f", the last of {count} in {seconds:g} s" if count > 1 else ""
            self._end(management_pb2.JOB_PHASE_FAILED, self._how + losses)

    def _end(self, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        self.state = S.OVER
        self._stop_timer()
        if self.stream is not None:
            self.stream.end()
            self.stream = None
        report = management_pb2.JobReport()
        report.CopyFrom(self.job.report)
        report.phase, report.message = phase, message
        self._on_end(self.job, report)

    # --- tasks and the timer ------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            logger.error("A defect in the supervision of %s", self.job.name, exc_info=error)
            self.give_up()
            if self.state is not S.OVER:
                self._end(management_pb2.JOB_PHASE_FAILED, f"a defect in the management service: {error!r}")

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._run(self._end_time(seconds))

    async def _end_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.handle(TimeOver())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# The events that each state handles.
TRANSITIONS: Final[Mapping[CoordinatorState, Mapping[type, Callable[..., None]]]] = {
    S.STARTING: {
        Started: Supervision._started,
        StartFailed: Supervision._start_failed,
        Connected: Supervision._connected,
        Disconnected: Supervision._disconnected,
    },
    S.EXPECTED: {
        Exited: Supervision._exited,
        Lost: Supervision._lost,
        Connected: Supervision._connected,
        TimeOver: Supervision._hangs,
    },
    S.CONNECTED: {
        Exited: Supervision._exited,
        Lost: Supervision._lost,
        Connected: Supervision._connected,
        Disconnected: Supervision._disconnected,
    },
    S.UNKNOWN: {
        Connected: Supervision._connected,
        Disconnected: Supervision._disconnected,
    },
    S.AWAY: {
        Started: Supervision._started,
        Connected: Supervision._connected,
        TimeOver: Supervision._stayed_away,
    },
    S.OVER: {Started: Supervision._started_too_late},
}

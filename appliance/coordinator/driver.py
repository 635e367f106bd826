"""The driver of a job: it takes the job from state to state, and alone loads, starts and stops steps on the nodes."""

import enum
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, Verdict
from appliance.coordinator.execution.waiting import Abandoned, EpochOver
from appliance.coordinator.nodes.job_nodes import NodesDied, NodesRefused
from appliance.coordinator.recovery.recovery import Recovery
from waferbox import roles
from waferbox.host.event_loop import Changes
from wsc.v1 import node_pb2


class JobState(enum.Enum):
    """The states of a job whose coordinator runs.

    A death or a lost link leads from any state in which the job has nodes to RECOVERING.
    """

    QUEUED = "queued"  # waits for its nodes
    IDLE = "idle"  # no execution
    PREEMPTED = "preempted"  # no execution, and no nodes: others waited for them
    LOADING = "loading"  # the nodes load the plan of an execution, and open links
    WRITING = "writing"  # the client writes states
    STARTING = "starting"  # the states that were written become a recovery point
    RUNNING = "running"  # the nodes run steps
    GOING_BACK = "going back"  # steps beyond the one after which the script left its loop are undone
    STOPPING = "stopping"  # the nodes end the execution, because its steps are done or the client has left it
    RECOVERING = "recovering"  # dead nodes are replaced, and the states are restored or the execution is resumed
    ENDED = "ended"  # there is a reason to end the job


TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.QUEUED: frozenset({JobState.IDLE, JobState.ENDED}),
    JobState.IDLE: frozenset({JobState.LOADING, JobState.PREEMPTED, JobState.RECOVERING, JobState.ENDED}),
    JobState.PREEMPTED: frozenset({JobState.RECOVERING, JobState.ENDED}),
    JobState.LOADING: frozenset({JobState.WRITING, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}),
    JobState.WRITING: frozenset({JobState.STARTING, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}),
    JobState.RUNNING: frozenset({JobState.GOING_BACK, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}),
    JobState.GOING_BACK: frozenset({JobState.RUNNING, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}),
    JobState.STOPPING: frozenset({JobState.IDLE, JobState.ENDED}),
    JobState.RECOVERING: frozenset(
        {JobState.IDLE, JobState.LOADING, JobState.RUNNING, JobState.STOPPING, JobState.RECOVERING, JobState.ENDED}
    ),
}


class DrivenJob(Protocol):
    """The job, as far as its driver depends on it."""

    @property
    def recovers(self) -> bool:
        """Whether the job survives a death."""

    @property
    def execution(self) -> CoordinatedExecution | None:
        """The current execution."""

    @property
    def needs_nodes(self) -> bool:
        """Whether an execution or a call of the client waits for nodes."""

    async def get_nodes(self) -> None:
        """Gets the nodes of the job, the first time or after a preemption. Raises JobFailed."""

    async def give_back_nodes(self) -> None:
        """Gives all nodes back. Raises NodesRefused."""

    def end_execution(self, execution: CoordinatedExecution) -> None:
        """Notes that an execution has ended on all nodes."""

    def died(self, name: str, message: str) -> None:
        """Handles the death of a node, or of one that is given up."""


class JobDriver:
    """The driver of one job. Used in one event loop."""

    def __init__(self, job: DrivenJob, recovery: Recovery, verdict: Verdict, changes: Changes) -> None:
        self.state = JobState.QUEUED
        self._job = job
        self._recovery = recovery
        self._verdict = verdict
        self._changes = changes
        self._is_preempted = False
        self._work: Mapping[JobState, Callable[[], Awaitable[JobState]]] = {
            JobState.QUEUED: self._queued,
            JobState.IDLE: self._idle,
            JobState.PREEMPTED: self._preempted,
            JobState.LOADING: self._loading,
            JobState.WRITING: self._writing,
            JobState.STARTING: self._starting,
            JobState.RUNNING: self._running,
            JobState.GOING_BACK: self._going_back,
            JobState.STOPPING: self._stopping,
            JobState.RECOVERING: self._recovering,
        }

    @property
    def is_live(self) -> bool:
        """Whether the job has all its nodes, with states."""
        recovery = self._recovery
        return (
            self.state not in (JobState.QUEUED, JobState.PREEMPTED, JobState.RECOVERING)
            and not recovery.is_interrupted
            and not recovery.is_incomplete
        )

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the job has no nodes at all, and waits for some or needs none."""
        return self.state in (JobState.QUEUED, JobState.PREEMPTED)

    def preempt(self) -> None:
        """Makes the job give its nodes back if it is idle."""
        self._is_preempted = True
        self._changes.notify()

    async def run(self) -> None:
        """Takes the job from state to state until it ends."""
        while self.state is not JobState.ENDED:
            try:
                following = await self._work[self.state]()
            except Abandoned:
                following = JobState.STOPPING
            except JobFailed:
                following = JobState.ENDED
            except (EpochOver, NodesDied):
                following = await self._interrupted()
            except NodesRefused as error:
                failure = node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=str(error)
                )
                self._verdict.report(failure)
                following = JobState.ENDED
            assert following in TRANSITIONS[self.state], f"{self.state} does not lead to {following}"
            self.state = following
            self._changes.notify()

    # --- one function a state: works until the state ends, and returns the following one ------------------------------

    async def _queued(self) -> JobState:
        await self._job.get_nodes()
        return JobState.IDLE

    async def _idle(self) -> JobState:
        self._is_preempted = False
        await self._until(lambda: not self.is_live or self._job.execution is not None or self._is_preempted)
        if self.is_live and self._job.execution is None:
            return JobState.PREEMPTED
        if not self.is_live or self._execution().is_started:
            return JobState.RECOVERING  # an earlier incarnation of the coordinator has started the execution
        return JobState.LOADING

    async def _preempted(self) -> JobState:
        await self._job.give_back_nodes()
        await self._until(lambda: self._job.needs_nodes)
        await self._job.get_nodes()
        return JobState.RECOVERING

    async def _loading(self) -> JobState:
        await self._execution().load()
        return JobState.WRITING

    async def _writing(self) -> JobState:
        await self._execution().wait_for_states()
        return JobState.STARTING

    async def _starting(self) -> JobState:
        await self._execution().start()
        return JobState.RUNNING

    async def _running(self) -> JobState:
        execution = self._execution()
        await execution.wait_for_end()
        return JobState.GOING_BACK if execution.is_too_far else JobState.STOPPING

    async def _going_back(self) -> JobState:
        await self._recovery.go_back()
        return JobState.RUNNING

    async def _stopping(self) -> JobState:
        if (execution := self._job.execution) is not None:
            late = await execution.stop()
            for member in late:
                self._job.died(member.name, f"{member.name} did not stop in time")
            self._job.end_execution(execution)
        return JobState.IDLE

    async def _recovering(self) -> JobState:
        await self._recovery.recover()
        if self._recovery.is_interrupted:
            return JobState.RECOVERING
        execution = self._job.execution
        if execution is None or (execution.is_started and not execution.number):
            return JobState.IDLE
        return JobState.RUNNING if execution.is_started else JobState.LOADING

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Waits for a condition. Raises JobFailed."""

        def checked() -> bool:
            if self._verdict.failure is not None:
                raise JobFailed(self._verdict.failure)
            return ready()

        await self._changes.until(checked)

    # --- the ends of states -------------------------------------------------------------------------------------------

    async def _interrupted(self) -> JobState:
        """Returns the state after a death or a lost link."""
        self._recovery.failed()
        if self._job.recovers:
            return JobState.RECOVERING
        await self._recovery.fail()
        return JobState.ENDED

    def _execution(self) -> CoordinatedExecution:
        execution = self._job.execution
        assert execution is not None, "the driver alone ends executions"
        return execution

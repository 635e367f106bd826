"""Recovery of a job: after a death replacements are attached, and a new epoch runs from the last recovery point."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, Verdict
from appliance.coordinator.execution.recovery_points import NoRecoveryPoint, RecoveryPoints
from appliance.coordinator.execution.waiting import Abandoned
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.recovery.fewer_wafers import FewerWafers
from appliance.coordinator.recovery.restarts import RestartLimit
from waferbox import deadlines, roles, settings
from waferbox.host.clock import Clock, seconds_since_1970
from waferbox.host.event_loop import Changes
from wsc.v1 import management_pb2, node_pb2

logger = logging.getLogger(__name__)

# A request to management: with lost nodes, a timeout in seconds, and the names of the members, lost or not, that only a
# node on the same host can replace, it returns all nodes of the job.
RequestReplacements: TypeAlias = Callable[
    [Sequence[management_pb2.NodeInfo], float, Sequence[str]], Awaitable[management_pb2.Acquired]
]


class RecoverableExecutions(Protocol):
    """The executions of the job; see appliance.coordinator.execution_slot."""

    @property
    def current(self) -> CoordinatedExecution | None: ...

    @property
    def is_awaited(self) -> bool: ...

    async def restore(self) -> None: ...


class Recovery:
    """The deaths and lost links of a job, and the recovery from them, for which the driver of the job calls recover.

    Used in one event loop.
    """

    def __init__(
        self,
        executions: RecoverableExecutions,
        nodes: JobMembers,
        inputs: Inputs,
        points: RecoveryPoints,
        verdict: Verdict,
        changes: Changes,
        clock: Clock,
        limit: RestartLimit,
        fewer_wafers: FewerWafers,
        *,
        replace: RequestReplacements,
        on_recovered: Callable[[management_pb2.Restart, str], None],
    ) -> None:
        """Makes the recovery of a job from which nothing is missing.

        Args:
            executions: of the job.
            nodes: the members of the job.
            inputs: of the job.
            points: the recovery points of the job.
            verdict: the reason why the job ends.
            changes: of the state of the job.
            clock: of this host.
            limit: counts restarts.
            fewer_wafers: used for want of replacements.
            replace: gets replacements for nodes within so many seconds, of the named members on their hosts; returns
                all nodes. Raises NodesRefused.
            on_recovered: called with a restart and its message for the user when steps can run again.
        """
        self._executions = executions
        self._nodes = nodes
        self._inputs = inputs
        self._points = points
        self._verdict = verdict
        self._changes = changes
        self._clock = clock
        self._limit = limit
        self._fewer_wafers = fewer_wafers
        self._replace = replace
        self._on_recovered = on_recovered
        self.is_incomplete = False  # whether a recovery has begun and did not come to its end
        self._dead: dict[str, tuple[Member, str]] = {}  # with the reason
        self._counted: dict[str, tuple[Member, str]] = {}  # those that RestartLimit has counted
        self._lost: list[node_pb2.Failure] = []  # failures that need a new epoch but no replacement
        self._unprepared: set[str] = set()  # members that may lack inputs
        # Causes and replacements since the last report: the step from which the job resumes is not known before.
        self._causes: list[str] = []
        self._replaced = ""
        self._waits_for: management_pb2.QueueStatus | None = None
        self._interrupted_at: float | None = None  # time of the first death or loss since the last recovery

    @property
    def is_interrupted(self) -> bool:
        """Whether a node or a link is missing."""
        return bool(self._dead or self._lost)

    def take_over(self, cause: str) -> None:
        """Notes a take-over: the job has nodes, and none is attached to. cause: for the user.

        Members that management has lost are replaced at once; found dead one by one, each would count as a restart.
        """
        for member in self._nodes.topology.members():
            self._unprepared.add(member.name)
            if not member.node.lease_left_seconds:
                reason = "died or was cut off: the management service has lost it"
                self._dead[member.name] = (member, f"{self._nodes.describe(member.name)} {reason}")
        self._causes.append(cause)
        self._lost.append(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=cause))
        self._interrupt()

    def preempted(self) -> None:
        """Notes that the job has nodes again after a preemption: they have no states, and none is attached to."""
        self.is_incomplete = True
        self._unprepared.update(member.name for member in self._nodes.topology.members())

    def died(self, member: Member, message: str) -> None:
        """Notes a node that has died or is given up. message: for the user."""
        if self._nodes.has(member):
            known = self._dead.get(member.name)
            if known is None or known[0] is not member:  # its connection and management both report a death
                self._dead[member.name] = (member, message)
            self._nodes.give_up(member)
            self._interrupt()

    def lost(self, failure: node_pb2.Failure) -> None:
        """Notes a lost link, or another failure that is no node's death."""
        execution = self._executions.current
        if failure.peer and (execution is None or execution.is_epoch_over):
            return  # a link may end with its epoch
        self._lost.append(failure)
        self._interrupt()

    def ended_by(self, failure: node_pb2.Failure) -> node_pb2.Failure:
        """The failure of a job that another failure ends: that of its nodes, if what the user can do follows from it.

        A recovery point that is damaged is of interest to the user as a node has died, and as the job cannot go on.
        """
        if not self.is_incomplete or failure.kind != node_pb2.Failure.KIND_USER:
            return failure
        message = "; ".join([*self._causes, failure.message])
        return node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=failure.node, message=message)

    def failed(self) -> None:
        """Notes that an attempt to run an epoch has failed; if no death is known, links could not be opened."""
        if not self.is_interrupted:
            message = "links between nodes could not be opened"
            self._lost.append(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=message))
            self._interrupt()

    def waits_for(self, status: management_pb2.QueueStatus) -> None:
        """Notes the nodes that management lacks for the job."""
        self._waits_for = status

    def long_wait(self) -> management_pb2.QueueStatus | None:
        """Returns the status, once, if the job lacks a node for longer than a launcher takes to start it."""
        status, since = self._waits_for, self._interrupted_at
        if status is None or since is None or self._clock.monotonic() - since < deadlines.RECOVERY.launcher:
            return None
        self._waits_for = None
        return status if status.waiting_for else None

    async def recover(self) -> None:
        """Replaces dead nodes, and resumes the execution or restores the states.

        Raises JobFailed, Abandoned, EpochOver, NodesDied, NodesRefused.
        """
        self.is_incomplete = True
        self._points.give_up()
        await self._end_epoch()
        self._count_restart()
        await self._replace_dead()
        execution = self._executions.current  # it may have begun meanwhile
        from_step = await self._resume(execution)
        if self.is_interrupted:
            return  # again
        self.is_incomplete = False
        if execution is not None or not self._executions.is_awaited:
            if self._causes:
                self._report_restart(from_step, execution)
            self._interrupted_at = None

    async def go_back(self) -> None:
        """Runs the execution up to the step after which the client has left its loop, from a recovery point before it.

        Raises JobFailed, Abandoned, EpochOver.
        """
        await self._end_epoch()
        await self._resume(self._executions.current)

    async def fail(self) -> None:
        """Ends a job that does not recover, after a lost link: for the death of a node, if that is why it was lost."""
        with contextlib.suppress(Abandoned, JobFailed):
            await self._end_epoch()
        failure = self._lost[0]
        for name, (_, message) in self._dead.items():
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=name, message=message)
        self._verdict.report(failure)

    async def _end_epoch(self) -> None:
        """Ends the epoch on all living members. Raises JobFailed, Abandoned.

        Each member answers, or is found dead: neighbours of a node that dies lose their links to it, often before the
        end of its process is noticed.
        """
        execution = self._executions.current
        if execution is not None:
            live = [member for member in self._nodes.live_members() if member.name not in self._dead]
            for member in await execution.end_epoch(live):
                self.died(member, f"{self._nodes.describe(member.name)} does not answer")

    def _interrupt(self) -> None:
        """Ends the epoch, if there is one."""
        if self._interrupted_at is None:
            self._interrupted_at = self._clock.monotonic()
        execution = self._executions.current
        if execution is not None:
            execution.epoch_over()
        self._changes.notify()

    def _count_restart(self) -> None:
        """Counts what is missing as a restart. Raises JobFailed at the limit."""
        missed = {name: message for name, (_, message) in self._dead.items()}
        missed = missed or {f"{lost.node} {lost.peer}": lost.message for lost in self._lost}
        # A member whose replacement failed, as another node died meanwhile, counts once.
        known = [name for name, died in self._dead.items() if self._counted.get(name) is died]
        self._counted = dict(self._dead)
        self._lost.clear()
        if counted := {name: message for name, message in missed.items() if name not in known}:
            self._limit.add(counted, self._points.complete)
        if missed:
            logger.warning("%s", "; ".join(missed.values()))
        if self._limit.is_reached:
            raise self._verdict.fail(self._limit.failure())
        self._causes.extend(cause for cause in missed.values() if cause not in self._causes)

    def _report_restart(self, from_step: int | None, execution: CoordinatedExecution | None) -> None:
        """Reports that the job has resumed."""
        now = self._clock.monotonic()
        cause, replaced = "; ".join(self._causes), self._replaced
        self._causes, self._replaced = [], ""
        restart = management_pb2.Restart(
            time=seconds_since_1970(self._clock),
            cause=cause,
            replaced=replaced,
            from_step=from_step or 0,
            reached_step=0 if execution is None else execution.shown_step,
            seconds=now - (now if self._interrupted_at is None else self._interrupted_at),
        )
        placed = f"In its place: {replaced}. " if replaced else ""
        where = "" if from_step is None else f" from step {from_step}"
        self._on_recovered(restart, f"{cause}. {placed}The job has resumed{where}, after {restart.seconds:.1f} s")

    async def _resume(self, execution: CoordinatedExecution | None) -> int | None:
        """Restores the states and resumes the execution; returns the step, or None if no step has run."""
        try:
            if execution is not None and execution.is_started:
                return await execution.resume()
            if execution is not None:
                execution.restore_initial_states()
            elif not self._executions.is_awaited:
                await self._executions.restore()
        except NoRecoveryPoint as error:
            message = "; ".join([*self._causes, str(error)])
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=message)
            raise self._verdict.fail(failure) from error
        return None  # the client writes the states again, or reports its progress

    def _bound(self) -> Sequence[str]:
        """Returns members that only a node on their host can replace, as shares of the recovery point are there.

        Members send each other the shares that are on their hosts. A living one, too, is named, as management may give
        it to another job while this one waits; a dead one only if no living one is on a host that has the share.
        """
        keepers = sorted(self._nodes.topology.state_keepers, key=lambda keeper: keeper.name in self._dead)
        return self._points.covering({keeper.name: keeper.node.host for keeper in keepers})

    async def _replace_dead(self) -> None:
        """Replaces the dead members, or reduces the job to fewer wafers."""
        dead = dict(self._dead)
        self._unprepared.update(dead)
        members = [member for member, _ in dead.values()]
        seconds = settings.REPLACEMENT_SECONDS.get()
        try:
            await self._nodes.replace(members, lambda lost: self._replace(lost, seconds, self._bound()))
            self._replaced = ", ".join(map(self._nodes.describe, dead)) or self._replaced
        except TimeoutError as error:
            deaths = "; ".join(message for _, message in dead.values())
            present = self._nodes.topology.members()
            dead = {name: died for name, died in self._dead.items() if died[0] in present}  # with later deaths
            # Living workers may move to other indices, even if a node dies meanwhile.
            self._unprepared.update(member.name for member in self._nodes.topology.workers)
            result, why = "", str(error)
            try:
                result = await self._fewer_wafers.shrink_to_survivors(dead)
            except TimeoutError as without_answer:
                why = f"the job cannot have fewer wafers either: {without_answer}"
            if not result:
                failure = node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE,
                    node=members[0].name if members else "",
                    message=f"{deaths}; {_no_replacement(members, seconds, why)}" if members else why,
                )
                raise self._verdict.fail(failure) from error
            self._causes.append(result)
        for name, died in dead.items():
            if self._dead.get(name) == died:
                del self._dead[name]
        workers = [m for m in self._nodes.topology.workers if m.name in self._unprepared]
        self._inputs.prepare_again(workers)
        self._unprepared.clear()


def _no_replacement(members: Sequence[Member], seconds: float, why: str) -> str:
    """Text for the user, with the way out."""
    modules = dict.fromkeys(roles.role_of(member.role).module for member in members)
    start = ", ".join(f"`python -m {module} --management ADDRESS`" for module in modules)
    return (
        f"there was no replacement within {seconds:g} s: {why}. Start nodes ({start}), then the script "
        f"again from its last checkpoint; {settings.REPLACEMENT_SECONDS.name} of the cluster is how long a job waits"
    )

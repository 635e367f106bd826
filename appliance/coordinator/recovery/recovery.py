"""Recovery of a job: after a death replacements are attached, and a new epoch runs from the last recovery point."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, Verdict
from appliance.coordinator.execution.recovery_points import NoRecoveryPoint, RecoveryPoints
from appliance.coordinator.execution.waiting import Abandoned, EpochOver
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobMembers, NodesDied, NodesRefused
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.recovery.fewer_wafers import FewerWafers, RequestNodes
from appliance.coordinator.recovery.restarts import RestartLimit
from waferbox import deadlines, roles, settings
from waferbox.host.threads import GuardedThread
from wsc.v1 import management_pb2, node_pb2

logger = logging.getLogger(__name__)


class RecoverableExecutions(Protocol):
    """The executions of the job; see appliance.coordinator.execution_slot."""

    @property
    def current(self) -> CoordinatedExecution | None: ...

    @property
    def is_awaited(self) -> bool: ...

    def restore(self) -> None: ...


class Recovery:
    """The recovery of a job from deaths and lost links, with the thread that does it.

    Its lock is held by each thread that sends commands to nodes. died and lost can be called from any thread.
    """

    def __init__(
        self,
        executions: RecoverableExecutions,
        nodes: JobMembers,
        inputs: Inputs,
        points: RecoveryPoints,
        verdict: Verdict,
        limit: RestartLimit,
        fewer_wafers: FewerWafers,
        *,
        replace: RequestNodes,
        on_restart: Callable[[Sequence[str]], None],
        on_recovered: Callable[[management_pb2.Restart, str], None],
    ) -> None:
        """Makes the recovery; start begins its thread.

        Args:
            executions: of the job.
            nodes: the members of the job.
            inputs: of the job.
            points: the recovery points of the job.
            verdict: the reason why the job ends.
            limit: counts restarts.
            fewer_wafers: used for want of replacements.
            replace: gets replacements for nodes within so many seconds; returns all nodes. Raises NodesRefused.
            on_restart: called with the causes of all restarts since the last progress.
            on_recovered: called with a restart and its message for the user when steps can run again.
        """
        self.lock = threading.Lock()
        self._executions = executions
        self._nodes = nodes
        self._inputs = inputs
        self._points = points
        self._verdict = verdict
        self._replace = replace
        self._on_restart = on_restart
        self._on_recovered = on_recovered
        self._limit = limit
        self._fewer_wafers = fewer_wafers
        self._changed = threading.Condition()
        self._dead: dict[str, tuple[Member, str]] = {}  # with the reason
        self._counted: dict[str, tuple[Member, str]] = {}  # those that RestartLimit has counted
        self._lost: list[node_pb2.Failure] = []  # failures that need a new epoch but no replacement
        self._unprepared: set[str] = set()  # members that may lack inputs
        # A take-over, and what was replaced during it, until the step is known from which the job resumes.
        self._unreported_causes: list[str] = []
        self._unreported_replacements = ""
        self._is_live = True
        self._waits_for: management_pb2.QueueStatus | None = None
        self._interrupted_at = 0.0  # time of the first death or loss
        self._is_abandoned = False  # the client left the execution during its recovery: it is about to end
        self._has_ended = False  # the abandoned execution has ended: its states must still be restored
        self._closing = False
        self._thread = GuardedThread(self._run, name="recovery", on_defect=verdict.report_defect)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; requires a verdict, and a closed link to management."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._nodes.interrupt()
        if self._thread.ident is not None:
            self._thread.join()

    def take_over(self, cause: str) -> None:
        """Notes a take-over, before start: the job has nodes, and none is attached to. cause: for the user.

        Members that management has lost are replaced at once; found dead one by one, each would count as a restart.
        """
        for member in self._nodes.topology.members():
            self._unprepared.add(member.name)
            if not member.node.lease_left_seconds:
                reason = "died or was cut off: the management service has lost it"
                self._dead[member.name] = (member, f"{self._nodes.describe(member.name)} {reason}")
        self._unreported_causes.append(cause)
        self._lost.append(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=cause))
        self._is_live, self._interrupted_at = False, time.monotonic()

    def resume_taken_over(self, execution: CoordinatedExecution) -> None:
        """Resumes an execution that an earlier incarnation started. Raises JobFailed, Abandoned."""
        self.wait_until_live()
        with self.lock:
            if execution.number or not self._is_live:
                return  # the thread has resumed it, or will, as after any death
            with contextlib.suppress(EpochOver):
                causes = "; ".join(self._unreported_causes)
                self._report_restart(causes, self._unreported_replacements, self._resume(execution, causes), execution)

    def died(self, member: Member, message: str) -> None:
        """Reports a node that has died or is given up. message: for the user."""
        if self._nodes.has(member):
            with self._changed:
                known = self._dead.get(member.name)
                if known is None or known[0] is not member:  # its connection and management both report a death
                    self._dead[member.name] = (member, message)
            self._nodes.give_up(member)
            self._end_epoch()

    def lost(self, failure: node_pb2.Failure) -> None:
        """Reports a lost link, or another failure that is no node's death."""
        execution = self._executions.current
        if failure.peer and (execution is None or execution.is_epoch_over):
            return  # a link may end with its epoch
        with self._changed:
            self._lost.append(failure)
        self._end_epoch()

    def waits_for(self, status: management_pb2.QueueStatus) -> None:
        """Notes the nodes that management lacks for the job."""
        with self._changed:
            self._waits_for = status

    def long_wait(self) -> management_pb2.QueueStatus | None:
        """Returns the status, once, if the job lacks a node for longer than a launcher takes to start it."""
        with self._changed:
            status = self._waits_for
            if self._is_live or status is None or time.monotonic() - self._interrupted_at < deadlines.RECOVERY.launcher:
                return None
            self._waits_for = None
            return status if status.waiting_for else None

    def execution_ended(self) -> None:
        """Notes the end of the execution."""
        with self._changed:
            self._has_ended |= self._is_abandoned
            self._is_abandoned = False
            self._changed.notify_all()

    def wait_until_live(self) -> None:
        """Waits until all nodes are attached. Raises JobFailed."""
        with self._changed:
            while not self._is_live:
                if self._verdict.failure is not None:
                    raise JobFailed(self._verdict.failure)
                self._changed.wait()

    def wake(self) -> None:
        """Makes waits check for a verdict."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_interrupted(self) -> bool:
        """Whether a node or a link is missing."""
        return bool(self._dead or self._lost)

    def _end_epoch(self) -> None:
        """Ends the epoch, if there is one."""
        with self._changed:
            self._interrupted_at = time.monotonic() if self._is_live else self._interrupted_at
            self._is_live = False
            self._changed.notify_all()
        execution = self._executions.current
        if execution is not None:
            execution.epoch_over()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._dead or self._lost or self._has_ended)
                if self._lost and not self._dead and all(failure.peer for failure in self._lost):
                    # Most links are lost because a node has died, which is reported soon.
                    self._changed.wait_for(lambda: self._closing or self._dead, deadlines.RECOVERY.grace)
                if self._closing:
                    return
            try:
                self._recover()
            except (EpochOver, NodesDied):
                self._try_again()
            except Abandoned:
                with self._changed:
                    self._is_abandoned = True
                if self._executions.current is None:
                    self.execution_ended()
            except JobFailed:
                return
            except NodesRefused as error:
                failure = node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=str(error)
                )
                self._verdict.report(failure)
                return

    def _try_again(self) -> None:
        """Prepares another attempt after another death; if none is known, links could not be opened."""
        with self._changed:
            if not self.is_interrupted:
                message = "links between nodes could not be opened"
                self._lost.append(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=message))

    def _set_live(self) -> bool:
        """Marks all nodes as live; False if one is missing again."""
        with self._changed:
            self._is_live = not self.is_interrupted
            self._changed.notify_all()
            return self._is_live

    def _recover(self) -> None:
        with self.lock:  # threads that wait for nodes under this lock wake up, as the epoch is over
            with self._changed:
                missed = {name: message for name, (_, message) in self._dead.items()}
                missed = missed or {f"{lost.node} {lost.peer}": lost.message for lost in self._lost}
                causes = list(missed.values())
                # A member whose replacement failed, as another node died meanwhile, counts once.
                known = [name for name, died in self._dead.items() if self._counted.get(name) is died]
                self._counted = dict(self._dead)
                self._lost.clear()
                self._has_ended = False
            if counted := {name: message for name, message in missed.items() if name not in known}:
                self._limit.add(counted, self._points.complete)
                self._on_restart(self._limit.causes)
            logger.warning("%s", "; ".join(causes) or "the states are restored")
            if self._limit.is_reached:
                raise self._verdict.fail(self._limit.failure())
            self._points.give_up()
            # Read now: resume_taken_over, which then reports the restart, may clear it at any time.
            is_awaited = self._executions.is_awaited
            execution = self._executions.current
            if execution is not None:
                live = [member for member in self._nodes.live_members() if member.name not in self._dead]
                for member in execution.end_epoch(live):
                    self.died(member, f"{self._nodes.describe(member.name)} does not answer")
            replaced = self._replace_dead(causes)
            from_step = self._resume(execution, "; ".join(causes))
            if is_awaited:
                self._unreported_causes.extend(cause for cause in causes if cause not in self._unreported_causes)
                self._unreported_replacements = replaced or self._unreported_replacements
            if not self._set_live():
                return
        if causes and (execution is not None or not is_awaited):
            self._report_restart("; ".join(causes), replaced, from_step, execution)

    def _report_restart(
        self, cause: str, replaced: str, from_step: int | None, execution: CoordinatedExecution | None
    ) -> None:
        """Reports that the job has resumed."""
        restart = management_pb2.Restart(
            time=time.time(),
            cause=cause,
            replaced=replaced,
            from_step=from_step or 0,
            reached_step=0 if execution is None else execution.shown_step,
            seconds=time.monotonic() - self._interrupted_at,
        )
        placed = f"In its place: {replaced}. " if replaced else ""
        where = "" if from_step is None else f" from step {from_step}"
        self._on_recovered(restart, f"{cause}. {placed}The job has resumed{where}, after {restart.seconds:.1f} s")

    def _resume(self, execution: CoordinatedExecution | None, causes: str) -> int | None:
        """Restores the states and resumes the execution; returns the step, or None if no step has run."""
        try:
            if execution is not None and execution.is_started:
                return execution.resume()
            if execution is not None:
                execution.restore_initial_states()
            elif not self._executions.is_awaited:
                self._executions.restore()
        except NoRecoveryPoint as error:
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=f"{causes}; {error}")
            raise self._verdict.fail(failure) from error
        return None  # the client writes the states again, or reports its progress

    def _replace_dead(self, causes: list[str]) -> str:
        """Replaces the dead members; returns the replacements, for the user.

        causes: of the restart; a reduction to fewer wafers is appended.
        """
        with self._changed:
            dead = dict(self._dead)
        self._unprepared.update(dead)
        members = [member for member, _ in dead.values()]
        seconds = settings.REPLACEMENT_SECONDS.get()
        replaced = ""
        try:
            self._nodes.replace(members, lambda lost: self._replace(lost, seconds))
            replaced = ", ".join(map(self._nodes.describe, dead))
        except TimeoutError as error:
            deaths = "; ".join(message for _, message in dead.values())
            present = self._nodes.topology.members()
            with self._changed:  # with those that have died meanwhile
                dead = {name: died for name, died in self._dead.items() if died[0] in present}
            if not (result := self._fewer_wafers.shrink_to_survivors(dead)):
                failure = node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE,
                    node=members[0].name if members else "",
                    message=f"{deaths}; there was no replacement within {seconds:g} s: {error}"
                    if members
                    else str(error),
                )
                raise self._verdict.fail(failure) from error
            causes.append(result)
            self._unprepared.update(member.name for member in self._nodes.topology.workers)
        with self._changed:
            for name in dead:
                if self._dead.get(name) == dead[name]:
                    del self._dead[name]
        workers = [m for m in self._nodes.topology.workers if m.name in self._unprepared]
        self._inputs.prepare_again(workers)
        self._unprepared.clear()
        return replaced

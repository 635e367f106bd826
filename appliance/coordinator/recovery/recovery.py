"""What brings a job back: when somebody has died, others take their places, and a new epoch goes on from a point."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from appliance.coordinator.execution.execution import Execution
from appliance.coordinator.execution.execution_points import NoRecoveryPoint
from appliance.coordinator.execution.recovery_points import RecoveryPoints
from appliance.coordinator.execution.waiting import Abandoned, EpochOver
from appliance.coordinator.failures.verdict import GRACE_SECONDS, JobFailed, Verdict
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobNodes, NodesDied, NodesRefused
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.recovery.restarts import RestartLimit
from interconnect.threads import GuardedThread
from wsc.v1 import management_pb2, node_pb2

logger = logging.getLogger(__name__)

REPLACEMENT_VARIABLE = "WAFERBOX_REPLACEMENT_SECONDS"


def replacement_seconds() -> float:
    """How long a job waits for nodes in the places of those that have died."""
    return float(os.environ.get(REPLACEMENT_VARIABLE, "60"))


class Executions(Protocol):
    """Those of the job; see appliance.coordinator.executions."""

    @property
    def current(self) -> Execution | None: ...

    @property
    def is_awaited(self) -> bool: ...

    def restore(self) -> None: ...


class Recovery:
    """Owns the thread that does it, and the lock of whoever commands the nodes. report from any thread."""

    def __init__(
        self,
        executions: Executions,
        nodes: JobNodes,
        inputs: Inputs,
        points: RecoveryPoints,
        verdict: Verdict,
        limit: RestartLimit,
        *,
        replace: Callable[[Sequence[management_pb2.NodeInfo], float], management_pb2.Acquired],
        on_restart: Callable[[Sequence[str]], None],
        on_recovered: Callable[[str], None],
    ) -> None:
        """replace(nodes, seconds): other nodes for these; all of the job are returned. Raises NodesRefused.

        on_restart(causes): of all restarts since the job has got further. on_recovered(message): for the user.
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
        self._changed = threading.Condition()
        self._dead: dict[str, tuple[Member, str]] = {}  # and why
        self._lost: list[node_pb2.Failure] = []  # links, and what else a new epoch mends without a replacement
        self._unprepared: set[str] = set()  # members that may have none of the inputs
        self._untold = ""  # that another coordinator has died, until it is known from where the job goes on
        self._is_live = True
        self._closing = False
        self._thread = GuardedThread(self._run, name="recovery", on_defect=verdict.report_defect)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The job has ended: there is a verdict, and management does not answer any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._nodes.interrupt()
        if self._thread.ident is not None:
            self._thread.join()

    def take_up(self, cause: str) -> None:
        """Before start: the job has its nodes from another coordinator; none is attached to. cause: for the user."""
        self._unprepared.update(member.name for member in self._nodes.topology.members())
        self._untold = cause
        self._lost.append(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=cause))
        self._is_live = False

    def go_on(self, execution: Execution) -> None:
        """Run what is left of an execution that another coordinator had started. Raises JobFailed, Abandoned."""
        self.wait_until_live()
        with self.lock:
            if execution.number or not self._is_live:
                return  # that is done as after any death
            with contextlib.suppress(EpochOver):
                where = self._go_on(execution, self._untold)
                self._on_recovered(f"{self._untold}. The job goes on{where}")

    def died(self, member: Member, message: str) -> None:
        """A node is gone, or is given up. message: for the user."""
        if self._nodes.has(member):
            with self._changed:
                self._dead[member.name] = (member, message)
            self._disturb()
            self._nodes.interrupt()

    def lost(self, failure: node_pb2.Failure) -> None:
        """A link is lost, or something else that is no node's death."""
        execution = self._executions.current
        if failure.peer and (execution is None or execution.is_epoch_over):
            return  # whose end is known
        with self._changed:
            self._lost.append(failure)
        self._disturb()

    def wait_until_live(self) -> None:
        """Until all nodes are there. Raises JobFailed."""
        with self._changed:
            while not self._is_live:
                if self._verdict.failure is not None:
                    raise JobFailed(self._verdict.failure)
                self._changed.wait()

    def wake(self) -> None:
        """There is a verdict."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_disturbed(self) -> bool:
        """Whether somebody is missing."""
        return bool(self._dead or self._lost)

    def _disturb(self) -> None:
        """The epoch is over, if there is one."""
        with self._changed:
            self._is_live = False
            self._changed.notify_all()
        execution = self._executions.current
        if execution is not None:
            execution.epoch_over()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._dead or self._lost)
                if not self._dead and all(failure.peer for failure in self._lost):
                    # Most links are lost because a node has died, which is told soon.
                    self._changed.wait_for(lambda: self._closing or self._dead, GRACE_SECONDS)
                if self._closing:
                    return
            try:
                self._recover()
            except (EpochOver, NodesDied):
                continue  # somebody else has died meanwhile
            except Abandoned:
                continue  # the client has left the execution, which is being stopped
            except JobFailed:
                return
            except NodesRefused as error:
                failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node="management", message=str(error))
                self._verdict.report(failure)
                return

    def _recover(self) -> None:
        begin = time.monotonic()
        with self.lock:  # who waits for nodes with it has been told that the epoch is over
            with self._changed:
                causes = [message for _, message in self._dead.values()] or [f.message for f in self._lost]
                self._lost.clear()
            self._limit.add(causes, self._points.complete)
            self._on_restart(self._limit.causes)
            logger.warning("%s", "; ".join(causes))
            if self._limit.is_reached:
                self._verdict.report(self._limit.failure())
                return
            self._points.give_up()
            execution = self._executions.current
            if execution is not None:
                live = [member for member in self._nodes.live_members() if member.name not in self._dead]
                for member in execution.end_epoch(live):
                    self.died(member, f"{self._nodes.describe(member.name)} does not answer")
            replaced = self._replace_dead()
            where = self._go_on(execution, "; ".join(causes))
            with self._changed:
                if self.is_disturbed:
                    return
                self._is_live = True
                self._changed.notify_all()
        seconds = time.monotonic() - begin
        if execution is None and self._executions.is_awaited:
            return  # go_on tells it
        self._on_recovered(f"{'; '.join(causes)}. {replaced}The job goes on{where}, after {seconds:.1f} s")

    def _go_on(self, execution: Execution | None, causes: str) -> str:
        """Put the states back, and run what is left of the execution; returns from where, for the user."""
        try:
            if execution is not None and execution.is_started:
                return f" from step {execution.resume()}"
            if execution is None and not self._executions.is_awaited:
                self._executions.restore()
        except NoRecoveryPoint as error:
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=f"{causes}; {error}")
            self._verdict.report(failure)
            raise JobFailed(failure) from error
        return ""  # the client writes the states anew, or says how far it is

    def _replace_dead(self) -> str:
        """Others in the places of the dead; returns who they are, for the user."""
        with self._changed:
            dead = dict(self._dead)
        self._unprepared.update(dead)
        members = [member for member, _ in dead.values()]
        seconds = replacement_seconds()
        try:
            self._nodes.replace(members, lambda lost: self._replace(lost, seconds))
        except TimeoutError as error:
            causes = "; ".join(message for _, message in dead.values())
            self._verdict.report(
                node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE,
                    node=members[0].name if members else "",
                    message=f"{causes}; and none came in its place within {seconds:g} s: {error}"
                    if members
                    else str(error),
                )
            )
            raise JobFailed(self._verdict.failure or node_pb2.Failure()) from error
        with self._changed:
            for name in dead:
                if self._dead.get(name) == dead[name]:
                    del self._dead[name]
        workers = [m for m in self._nodes.topology.workers if m.name in self._unprepared]
        self._inputs.prepare_again(workers)
        self._unprepared.clear()
        if not dead:
            return ""
        names = ", ".join(self._nodes.describe(name) for name in dead)
        return f"In {'its place' if len(dead) == 1 else 'their places'}: {names}. "

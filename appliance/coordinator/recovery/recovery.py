"""What brings a job back: when somebody has died, others take their places, and a new epoch goes on from a point."""

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


class RecoveringJob(Protocol):
    """What the recovery needs of the job."""

    def current_execution(self) -> Execution | None: ...

    def restore(self) -> None:
        """Between executions: put the states back on the nodes. Raises JobFailed, Abandoned, EpochOver."""

    def recovered(self, message: str) -> None:
        """For the user."""


class Recovery:
    """Owns the thread that does it, and the lock of whoever commands the nodes. report from any thread."""

    def __init__(
        self,
        job: RecoveringJob,
        nodes: JobNodes,
        inputs: Inputs,
        points: RecoveryPoints,
        verdict: Verdict,
        replace: Callable[[Sequence[management_pb2.NodeInfo], float], management_pb2.Acquired],
        max_num_restarts: int,
    ) -> None:
        """replace(nodes, seconds): other nodes for these; all of the job are returned. Raises NodesRefused."""
        self.lock = threading.Lock()
        self._job = job
        self._nodes = nodes
        self._inputs = inputs
        self._points = points
        self._verdict = verdict
        self._replace = replace
        self._limit = RestartLimit(max_num_restarts)
        self._changed = threading.Condition()
        self._dead: dict[str, tuple[Member, str]] = {}  # and why
        self._lost: list[node_pb2.Failure] = []  # links, and what else a new epoch mends without a replacement
        self._is_live = True
        self._is_abandoned = False  # the execution, by its client, while the nodes went back: it is about to end
        self._has_ended = False  # that one: the states are still to be put back
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

    def died(self, member: Member, message: str) -> None:
        """A node is gone, or is given up. message: for the user."""
        if self._nodes.has(member):
            with self._changed:
                self._dead[member.name] = (member, message)
            self._nodes.give_up(member)
            self._disturb()

    def lost(self, failure: node_pb2.Failure) -> None:
        """A link is lost, or something else that is no node's death."""
        execution = self._job.current_execution()
        if failure.peer and (execution is None or execution.is_epoch_over):
            return  # whose end is known
        with self._changed:
            self._lost.append(failure)
        self._disturb()

    def execution_ended(self) -> None:
        """There is no execution any more."""
        with self._changed:
            self._has_ended |= self._is_abandoned
            self._is_abandoned = False
            self._changed.notify_all()

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
        execution = self._job.current_execution()
        if execution is not None:
            execution.epoch_over()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._dead or self._lost or self._has_ended)
                if self._lost and not self._dead and all(failure.peer for failure in self._lost):
                    # Most links are lost because a node has died, which is told soon.
                    self._changed.wait_for(lambda: self._closing or self._dead, GRACE_SECONDS)
                if self._closing:
                    return
            try:
                self._recover()
            except (EpochOver, NodesDied):
                continue  # somebody else has died meanwhile
            except Abandoned:
                with self._changed:
                    self._is_abandoned = True
                if self._job.current_execution() is None:
                    self.execution_ended()
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
                self._has_ended = False
            if causes:
                self._limit.add(causes, self._points.complete)
            logger.warning("%s", "; ".join(causes) or "the states are put back")
            if self._limit.is_reached:
                self._verdict.report(self._limit.failure())
                return
            self._points.give_up()
            execution = self._job.current_execution()
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
        if causes:
            self._job.recovered(f"{'; '.join(causes)}. {replaced}The job goes on{where}, after {seconds:.1f} s")

    def _go_on(self, execution: Execution | None, causes: str) -> str:
        """Put the states back, and run what is left of the execution; returns from where, for the user."""
        if execution is None:
            self._job.restore()
        elif execution.is_started:
            try:
                return f" from step {execution.resume()}"
            except NoRecoveryPoint as error:
                failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=f"{causes}; {error}")
                self._verdict.report(failure)
                raise JobFailed(failure) from error
        return ""  # the client writes the states anew

    def _replace_dead(self) -> str:
        """Others in the places of the dead; returns who they are, for the user."""
        with self._changed:
            dead = dict(self._dead)
        if not dead:
            return ""
        members = [member for member, _ in dead.values()]
        seconds = replacement_seconds()
        try:
            self._nodes.replace(members, lambda lost: self._replace(lost, seconds))
        except TimeoutError as error:
            causes = "; ".join(message for _, message in dead.values())
            self._verdict.report(
                node_pb2.Failure(
                    kind=node_pb2.Failure.KIND_NODE,
                    node=members[0].name,
                    message=f"{causes}; and none came in its place within {seconds:g} s: {error}",
                )
            )
            raise JobFailed(self._verdict.failure or node_pb2.Failure()) from error
        with self._changed:
            for name in dead:
                if self._dead.get(name) == dead[name]:
                    del self._dead[name]
        workers = [m for m in self._nodes.live_members() if m.role == node_pb2.ROLE_WORKER and m.name in dead]
        self._inputs.prepare_again(workers)
        names = ", ".join(self._nodes.describe(name) for name in dead)
        return f"In {'its place' if len(dead) == 1 else 'their places'}: {names}. "

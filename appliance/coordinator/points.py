"""The recovery points of a job: their schedule, their copies, and the nodes' responses about them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.recovery_points import RecoveryPoint, RecoveryPoints
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.observation.spans import Pace
from appliance.coordinator.record import JobRecord
from waferbox import deadlines, settings
from waferbox.host.clock import Clock
from wsc.v1 import node_pb2

# --- Copies of point shares -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHolder:
    """A member that has written its point share."""

    name: str
    host: str
    folder: str  # equal for members with the same folder; empty: unknown


def choose_copiers(keepers: Sequence[ShareHolder]) -> Mapping[str, str]:
    """Returns the member that copies each share, by the name of the share's owner; without shares that none can copy.

    A copy is on another host if there is one. Copies are spread evenly. keepers: in the order of their numbers.
    """
    chosen: dict[str, str] = {}
    load: Counter[str] = Counter()
    for number, keeper in enumerate(keepers):
        following = [*keepers[number + 1 :], *keepers[:number]]
        others = [other for other in following if keeper.folder and other.folder not in ("", keeper.folder)]
        if others:
            # Among equals the first in this order.
            copier = min(others, key=lambda other: (other.host == keeper.host, load[other.name]))
            chosen[keeper.name] = copier.name
            load[copier.name] += 1
    return chosen


# --- The schedule of recovery points ----------------------------------------------------------------------------------


class PointSchedule:
    """The schedule of recovery points while steps run, by seconds."""

    def __init__(self, pace: Pace, keep: Callable[[int], bool], clock: Clock) -> None:
        """keep(step): requests a point after this step; False if the execution has no such step."""
        self._pace = pace
        self._keep = keep
        self._interval = settings.RECOVERY_SECONDS.get()
        self._clock = clock
        self._last = clock.monotonic()
        self._epoch = 0

    def tick(self, epoch: int) -> None:
        """Requests a point if one is due; to be called once a second during an execution. epoch: its number."""
        now = self._clock.monotonic()
        if epoch != self._epoch:
            self._epoch, self._last = epoch, now
        if now - self._last < self._interval:
            return
        step = self._pace.step_after(deadlines.RECOVERY.point_lead, epoch)
        if step is not None and self._keep(step):
            self._last = now


# --- All recovery points of a job -------------------------------------------------------------------------------------


ALL_POINTS: Final = (1 << 64) - 1


class JobPoints:
    """The recovery points of a job, with schedule and copies. Used in one event loop."""

    def __init__(
        self,
        nodes: JobMembers,
        record: JobRecord,
        pace: Pace,
        current_execution: Callable[[], CoordinatedExecution | None],
        clock: Clock,
    ) -> None:
        """record: has the last complete point of an earlier incarnation, and records each new one."""
        self.points = RecoveryPoints(record.point, self._copy, self._completed, self._forgotten)
        self._nodes = nodes
        self._record = record
        self._current_execution = current_execution
        self._schedule = PointSchedule(pace, self._keep, clock)

    def tick(self) -> None:
        """Does periodic work; to be called once a second."""
        execution = self._current_execution()
        if execution is not None:
            execution.settle_point()
            if execution.may_keep_point():
                self._schedule.tick(execution.number)

    def responded(self, member: str, response: node_pb2.AttachResponse) -> bool:
        """Handles a member's response about recovery points; False if it is another."""
        kept, copied = response.recovery_point_kept, response.recovery_point_copied
        match response.WhichOneof("kind"):
            case "recovery_point_kept" if kept.given_up:
                self.points.given_up(kept.recovery_point)
            case "recovery_point_kept":
                self.points.kept(member, self._host(member), kept)
            case "recovery_point_copied":
                host = "" if copied.given_up else self._host(member)
                self.points.copied(copied.member, copied.recovery_point, host)
            case _:
                return False
        self._settle()
        return True

    def drop(self, before: int = ALL_POINTS) -> None:
        """Makes the nodes remove the points before this one."""
        drop = node_pb2.AttachRequest(drop_recovery_points=node_pb2.DropRecoveryPoints(before=before))
        self._nodes.send(self._nodes.topology.state_keepers, lambda _: drop)

    def _host(self, name: str) -> str:
        """Returns the host of a state keeper; empty if the job has it no more."""
        keepers = self._nodes.topology.state_keepers if self._nodes.is_leased else ()
        return next((keeper.node.host for keeper in keepers if keeper.name == name), "")

    def _keep(self, step: int) -> bool:
        execution = self._current_execution()
        return execution is not None and execution.keep_point(step)

    def _settle(self) -> None:
        execution = self._current_execution()
        if execution is not None:
            execution.settle_point()

    def _copy(self, kept: Mapping[str, node_pb2.RecoveryPointKept]) -> Collection[str]:
        """Orders copies of shares on one disk only, once all are written; returns the owners of these shares."""
        members = {member.name: member for member in self._nodes.topology.state_keepers}
        if not members.keys() <= kept.keys():
            return ()
        copiers = choose_copiers(
            [ShareHolder(name=name, host=m.node.host, folder=kept[name].folder) for name, m in members.items()]
        )
        for name, copier in copiers.items():
            self._order_copy(members[copier], members[name], kept[name])
        return copiers.keys()

    def _order_copy(self, copier: Member, owner: Member, kept: node_pb2.RecoveryPointKept) -> None:
        copy = node_pb2.CopyRecoveryPoint(
            member=owner.name,
            address=owner.node.address,
            recovery_point=kept.recovery_point,
            same_as=kept.same_as,
            nbytes=kept.nbytes,
        )
        self._nodes.send([copier], lambda _: node_pb2.AttachRequest(copy_recovery_point=copy))

    def _completed(self, point: RecoveryPoint) -> None:
        self._record.completed(point)
        self.drop(point.number)

    def _forgotten(self, before: int) -> None:
        self._record.drop_point()
        self.drop(before)

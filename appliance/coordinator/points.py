"""The recovery points of a job: when they are made, what the nodes say of them, which one it would go on from."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from appliance.coordinator.execution.execution import Execution
from appliance.coordinator.execution.recovery_points import RecoveryPoint, RecoveryPoints
from appliance.coordinator.nodes.job_nodes import JobNodes
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.observation.pace import Pace
from appliance.coordinator.record import JobRecord
from appliance.coordinator.recovery.copies import Keeper, choose_copiers
from appliance.coordinator.recovery.point_schedule import PointSchedule
from wsc.v1 import node_pb2

ALL_POINTS: Final = (1 << 64) - 1


class JobPoints:
    """tick from one thread, the rest from any."""

    def __init__(
        self, nodes: JobNodes, record: JobRecord, pace: Pace, current_execution: Callable[[], Execution | None]
    ) -> None:
        """record: knows the last that was complete with another coordinator, and is told of each that is."""
        self.points = RecoveryPoints(record.point, self._copy, self._completed, self._forgotten)
        self._nodes = nodes
        self._record = record
        self._current_execution = current_execution
        self._schedule = PointSchedule(pace, self._keep)

    def tick(self) -> None:
        """To be called once a second."""
        execution = self._current_execution()
        if execution is not None:
            execution.settle_point()
            if execution.may_keep_point():
                self._schedule.tick(execution.number)

    def responded(self, member: str, response: node_pb2.AttachResponse) -> bool:
        """What a member says; False if it is not of recovery points."""
        kept, copied = response.recovery_point_kept, response.recovery_point_copied
        match response.WhichOneof("kind"):
            case "recovery_point_kept" if kept.given_up:
                self.points.given_up(kept.recovery_point)
            case "recovery_point_kept":
                self.points.kept(member, kept)
            case "recovery_point_copied":
                self.points.copied(copied.member, copied.recovery_point)
            case _:
                return False
        self._settle()
        return True

    def drop(self, before: int = ALL_POINTS) -> None:
        """Have the nodes remove those before this one."""
        drop = node_pb2.AttachRequest(drop_recovery_points=node_pb2.DropRecoveryPoints(before=before))
        self._nodes.send(self._nodes.topology.state_keepers, lambda _: drop)

    def _keep(self, step: int) -> bool:
        execution = self._current_execution()
        return execution is not None and execution.keep_point(step)

    def _settle(self) -> None:
        execution = self._current_execution()
        if execution is not None:
            execution.settle_point()

    def _copy(self, kept: Mapping[str, node_pb2.RecoveryPointKept]) -> Collection[str]:
        """If all keep a point, have copies made where a disk may be lost alone; returns the members of whose files."""
        members = {member.name: member for member in self._nodes.topology.state_keepers}
        if not members.keys() <= kept.keys():
            return ()
        copiers = choose_copiers(
            [Keeper(name=name, host=m.node.host, folder=kept[name].folder) for name, m in members.items()]
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
        self._record.forgot_point()
        self.drop(before)

"""A job on a state keeper: a shard of MemoryX, or a wafer in layer pipelined mode."""

from collections.abc import Callable, Sequence

from waferbox.host.folders import recovery_root
from waferbox.host.threads import CancellationToken
from waferbox.runtime.node_job import JobContext
from waferbox.runtime.role_job import RoleJob, report_failure
from waferbox.states.kernels import StateKernels
from waferbox.states.layout import StateRequirements
from waferbox.states.point_copies import PointCopies, owner_name
from waferbox.states.point_folders import member_folder
from waferbox.states.point_shares import PointShares
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2


class KeptStates:
    """The states of one job, which last as long as the job, and all that reads and writes them."""

    def __init__(
        self, context: JobContext, service: StateService, settings: StateSettings, is_running: Callable[[], bool]
    ) -> None:
        """settings: where the states are kept. is_running: returns whether steps change the states now."""
        self._context = context
        self._service = service
        self.store = StateStore(settings)
        self.kernels = StateKernels()
        self.snapshots = Snapshots(self.store, self._announce)
        self.copies = PointCopies(
            recovery_root,
            context.job,
            context.node,
            lambda copied: context.emit(node_pb2.AttachResponse(recovery_point_copied=copied)),
            on_defect=lambda error: report_failure(context, error),
            stays_in_memory=settings.folder is None,
        )
        self.recovery_points = PointShares(
            self.store,
            lambda: member_folder(recovery_root(), context.job, context.node),
            owner_name(context.job, context.node),
            lambda kept: context.emit(node_pb2.AttachResponse(recovery_point_kept=kept)),
            on_defect=lambda error: report_failure(context, error),
            fetch=self.copies.fetch,
        )
        self.missing: Sequence[str] = ()  # the states without a value, of those that were required last
        service.add_job(
            context.job,
            self.store,
            self.snapshots,
            is_running,
            self.copies.find,
            on_defect=lambda error: report_failure(context, error),
        )

    def load(self, required: StateRequirements, recovery_point: int) -> None:
        """Lays out the required states, and restores those of a recovery point if its number is not 0."""
        self.snapshots.reset()
        with self._service.alone(self._context.job):
            self.missing = self.recovery_points.load(required, recovery_point)
        if recovery_point:
            kept = self.recovery_points.loaded_point()
            self._context.emit(node_pb2.AttachResponse(recovery_point_kept=kept))

    def close(self) -> None:
        """Drops the states; no execution uses them any more."""
        self._service.remove_job(self._context.job)
        self.snapshots.reset()
        self.recovery_points.close()
        self.copies.close()
        self.store.close()

    def _announce(self, step: int) -> None:
        self._context.emit(node_pb2.AttachResponse(snapshot=node_pb2.Snapshot(step=step)))


class StateJob(RoleJob):
    """A job on a state keeper, which the client sees as a shard. Threads: as in RoleJob."""

    def __init__(self, context: JobContext, service: StateService, settings: StateSettings) -> None:
        super().__init__(context)
        self._states = KeptStates(context, service, settings, lambda: self.running)

    def missing_states(self) -> Sequence[str]:
        return self._states.missing

    def load(self, request: node_pb2.Load, cancellation: CancellationToken) -> Sequence[str]:
        self._states.copies.expect_loss(request.copies_at, cancellation)
        if request.links or not request.recovery_point:
            return super().load(request, cancellation)
        # The node replaces one that died between executions: the states are restored, and no program is compiled.
        self._drop()
        self._complete(request)
        slots = request.pipeline.states if request.HasField("pipeline") else request.memoryx.states
        self._states.load(StateRequirements(slots=slots), request.recovery_point)
        return self.missing_states()

    def start(self, request: node_pb2.Start) -> None:
        self._states.recovery_points.expect(request)
        super().start(request)

    def release_snapshot(self, step: int) -> None:
        self._states.snapshots.release(step)

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        if self.running_epoch == request.epoch:
            self._states.recovery_points.expect_after(request.step, request.recovery_point)

    def drop_recovery_points(self, before: int) -> None:
        self._states.recovery_points.drop(before)
        self._states.copies.drop(before)

    def copy_recovery_point(self, request: node_pb2.CopyRecoveryPoint) -> None:
        self._states.copies.copy(request)

    def close(self) -> None:
        super().close()
        self._states.close()

"""A job on a shard of MemoryX."""

from collections.abc import Mapping, Sequence

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from memoryx.files.state_memory import StateSettings
from memoryx.memoryx_program import MemoryXProgram
from memoryx.snapshots import Snapshots
from memoryx.state_service import StateService
from memoryx.store import StateStore
from nodes.lifecycle.execution import report_failure
from nodes.lifecycle.node_job import JobContext, LinkKey
from nodes.lifecycle.role_job import RoleJob
from wsc.v1 import node_pb2


class MemoryXJob(RoleJob):
    """Keeps the states of the job as long as it lasts, and shows them to the client."""

    def __init__(self, context: JobContext, service: StateService, settings: StateSettings) -> None:
        super().__init__(context)
        self._store = StateStore(settings)
        self._snapshots = Snapshots(self._store, self._announce)
        self._missing: Sequence[str] = ()
        self._service = service
        service.add_job(
            context.job,
            self._store,
            self._snapshots,
            lambda: self.running,
            on_defect=lambda error: report_failure(context, error),
        )

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> MemoryXProgram:
        self._snapshots.reset()
        with self._service.alone(self.context.job):
            self._missing = self._store.load(request.memoryx)
        return MemoryXProgram(request.memoryx, self._store, self._snapshots, hub, links)

    def missing_states(self) -> Sequence[str]:
        return self._missing

    def release_snapshot(self, step: int) -> None:
        self._snapshots.release(step)

    def close(self) -> None:
        super().close()
        self._service.remove_job(self.context.job)
        self._snapshots.reset()
        self._store.close()

    def _announce(self, step: int) -> None:
        self.context.emit(node_pb2.AttachResponse(snapshot=node_pb2.Snapshot(step=step)))

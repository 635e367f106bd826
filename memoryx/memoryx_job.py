"""A job on a shard of MemoryX."""

from collections.abc import Mapping, Sequence

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from memoryx.files.state_memory import StateSettings
from memoryx.kept_states import KeptStates
from memoryx.memoryx_program import MemoryXProgram
from memoryx.state_service import StateService
from nodes.lifecycle.node_job import JobContext, LinkKey
from nodes.lifecycle.role_job import RoleJob
from wsc.v1 import node_pb2


class MemoryXJob(RoleJob):
    """Keeps the states of the job as long as it lasts, and shows them to the client."""

    def __init__(self, context: JobContext, service: StateService, settings: StateSettings) -> None:
        super().__init__(context)
        self._states = KeptStates(context, service, settings, lambda: self.running)

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> MemoryXProgram:
        self._states.load(request.memoryx)
        return MemoryXProgram(request.memoryx, self._states.store, self._states.snapshots, hub, links)

    def missing_states(self) -> Sequence[str]:
        return self._states.missing

    def release_snapshot(self, step: int) -> None:
        self._states.snapshots.release(step)

    def close(self) -> None:
        super().close()
        self._states.close()

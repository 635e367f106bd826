"""A job on a shard of MemoryX."""

from collections.abc import Mapping

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from memoryx.kept_states import StateJob
from memoryx.memoryx_program import MemoryXProgram
from nodes.lifecycle.node_job import LinkKey
from wsc.v1 import node_pb2


class MemoryXJob(StateJob):
    """Keeps the states of the job as long as it lasts, and shows them to the client."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> MemoryXProgram:
        plan, states = request.memoryx, self._states
        states.load(plan, request.recovery_point)
        return MemoryXProgram(plan, states.kernels, states.store, states.snapshots, states.recovery_points, hub, links)

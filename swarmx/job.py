"""A job on a SwarmX node."""

from collections.abc import Mapping

from interconnect.hub import Hub
from interconnect.link import Link
from interconnect.node_job import LinkKey
from interconnect.role_job import RoleJob
from swarmx.program import SwarmXProgram
from wsc.v1 import node_pb2


class SwarmXJob(RoleJob):
    """Keeps nothing between steps."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> SwarmXProgram:
        return SwarmXProgram(request, hub, links)

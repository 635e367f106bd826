"""A job on a SwarmX node."""

from collections.abc import Mapping

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from nodes.lifecycle.node_job import LinkKey
from nodes.lifecycle.role_job import RoleJob
from swarmx.swarmx_program import SwarmXProgram
from wsc.v1 import node_pb2


class SwarmXJob(RoleJob):
    """Keeps nothing between steps."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> SwarmXProgram:
        return SwarmXProgram(request, hub, links)

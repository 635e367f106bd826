"""A job on a wafer."""

from collections.abc import Mapping

from interconnect.hub import Hub
from interconnect.link import Link
from interconnect.node_job import LinkKey
from interconnect.role_job import RoleJob
from wafer.program import WaferProgram
from wsc.v1 import node_pb2


class WaferJob(RoleJob):
    """Keeps nothing between executions."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> WaferProgram:
        return WaferProgram(request.wafer, request.wafer_number, hub, links)

"""A job on a wafer."""

from collections.abc import Mapping
from typing import Final

import torch

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from nodes.lifecycle.node_job import JobContext, LinkKey
from nodes.lifecycle.role_job import RoleJob
from wafer.wafer_program import WaferProgram
from wsc.v1 import node_pb2

# Below this, in a step, waking other threads costs more than they bring: a kernel takes microseconds.
THREADED_FLOPS: Final = 2_000_000_000


class WaferJob(RoleJob):
    """Keeps nothing between executions."""

    def __init__(self, context: JobContext, threads: int) -> None:
        """threads: as many as compute at most."""
        super().__init__(context)
        self._threads = threads

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> WaferProgram:
        # Holds for threads that begin to compute from now on, and so for the one that will run the steps.
        torch.set_num_threads(self._threads if request.wafer.flops >= THREADED_FLOPS else 1)
        return WaferProgram(request.wafer, request.wafer_number, hub, links)

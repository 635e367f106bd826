"""The reduction of a job to fewer wafers for want of replacements: the batch is divided again."""

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from appliance.coordinator.nodes.job_nodes import JobMembers
from waferbox import deadlines
from wsc.v1 import management_pb2, node_pb2

# A request to management: with some nodes and a timeout in seconds, it returns all nodes of the job.
RequestNodes: TypeAlias = Callable[[Sequence[management_pb2.NodeInfo], float], Awaitable[management_pb2.Acquired]]

logger = logging.getLogger(__name__)


class Plans(Protocol):
    """The plans of the job; see appliance.coordinator.plans."""

    async def divide(self, num_csx: int, num_shards: int) -> str: ...


class FewerWafers:
    """Reduces a job to the wafers that are left."""

    def __init__(
        self,
        nodes: JobMembers,
        plans: Plans,
        request: management_pb2.CreateJobRequest,
        reduce: RequestNodes,
    ) -> None:
        """reduce(nodes, seconds): has management reduce the job to these nodes. Raises NodesRefused, TimeoutError."""
        self._nodes = nodes
        self._plans = plans
        self._num_csx = request.num_csx
        self._least = request.min_num_csx or request.num_csx
        self._reduce = reduce

    async def shrink_to_survivors(self, dead: Collection[str]) -> str:
        """Reduces the job to as many living wafers as possible.

        Args:
            dead: names of the members without a replacement.

        Returns:
            The result, for the user; empty if the job may not, or cannot, have fewer wafers.

        Raises:
            NodesDied: another node has died meanwhile; the job has fewer wafers.
            NodesRefused: management refuses.
            TimeoutError: management, or a node, does not answer.
        """
        topology = self._nodes.topology
        left = [member for member in topology.members() if member.name not in dead]
        roles = [member.role for member in left]
        num_left = min(
            roles.count(node_pb2.ROLE_WAFER), roles.count(node_pb2.ROLE_WORKER) // topology.num_workers_per_wafer
        )
        others = (*topology.memoryx, *topology.swarmx)
        if num_left < self._least or any(member.name in dead for member in others):
            return ""
        for num_csx in range(num_left, self._least - 1, -1):
            if not (refusal := await self._plans.divide(num_csx, len(topology.state_keepers))):
                what = f"the job has {num_csx} of {self._num_csx} wafers from now on, as min_num_csx allows"
                result = f"there is no replacement of {', '.join(sorted(dead))}: {what}"
                logger.warning("%s", result)
                await self._nodes.reduce(
                    num_csx, dead, lambda nodes: self._reduce(nodes, deadlines.RECOVERY.fewer_wafers)
                )
                return result
            logger.warning("the job cannot have %d wafers: %s", num_csx, refusal)
        return ""

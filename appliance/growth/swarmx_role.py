"""The SwarmX tree in a simulation, as `swarmx/swarmx_program.py`: a level has a thread that takes frames in order."""

from collections import deque
from collections.abc import Callable

from appliance.growth.cluster import Cluster, Host
from appliance.growth.events import Count, Process
from nodes.steps.arena import ArenaCounts
from nodes.steps.schedule import part_bytes
from wsc.v1 import plan_pb2


class Tree:
    """All levels; frames enter at the wafers' end and at the shards' end."""

    def __init__(self, cluster: Cluster) -> None:
        self.wafer_released = Count(cluster.clock)  # gradient groups whose place a wafer may write again
        self._cluster = cluster
        self._nodes = [_Node(self, cluster, depth) for depth in range(len(cluster.levels))]
        for node in self._nodes:
            cluster.clock.start(node.run())
        self._released_by_shard = [0] * len(cluster.shards)
        gradients = set(ArenaCounts(cluster.plan.swarmx.arena).offsets)
        self._receivers = sorted(
            {shard for group in cluster.plan.swarmx.groups if group.id in gradients for shard in group.shards}
        )
        counts = ArenaCounts(cluster.plan.swarmx.arena)
        for shard in self._receivers:
            own = [g.id for g in cluster.plan.swarmx.groups if g.id in gradients and shard in g.shards]
            self._released_by_shard[shard] = counts.first_of(own)

    def send_weights(self, shard: int, group: plan_pb2.Group) -> None:
        """From a shard to all wafers."""
        root = self._nodes[0]
        self._cluster.carry(self._cluster.shards[shard], root.host, group.nbytes, lambda: root.take_down(group))

    def send_up(self, group: plan_pb2.Group, step: int) -> None:
        """From every wafer."""
        self.enter_from_below(len(self._nodes) - 1, self._cluster.wafer, group, step, part_bytes(group))

    def enter_from_below(self, depth: int, sender: Host, group: plan_pb2.Group, step: int, nbytes: int) -> None:
        """From each child of a node of this level."""
        node = self._nodes[depth]
        self._cluster.carry(
            sender, node.host, nbytes, lambda: node.take_up(group, step), senders=self._cluster.levels[depth].children
        )

    def send_credit(self, shard: int, taken: int) -> None:
        """Each wafer says how many weights groups of a shard it has taken."""
        self._pass_credit(len(self._nodes) - 1, shard, taken)

    def _pass_credit(self, depth: int, shard: int, taken: int) -> None:
        latency = self._cluster.rates.latency_seconds
        if depth < 0:
            self._after(latency, lambda: self._cluster.credit[shard].raise_to(taken))
            return
        node = self._nodes[depth]
        self._after(latency, lambda: node.take_credit(lambda: self._pass_credit(depth - 1, shard, taken)))

    def release(self, shard: int, count: int) -> None:
        """A shard has read gradient groups: so many of all, as far as it is concerned."""

        def told() -> None:
            self._released_by_shard[shard] = max(self._released_by_shard[shard], count)
            self._nodes[0].take_release(min(self._released_by_shard[each] for each in self._receivers))

        self._after(self._cluster.rates.latency_seconds, told)

    def tell_released(self, depth: int, count: int) -> None:
        """From a node of the level above; below the last there are the wafers."""
        latency = self._cluster.rates.latency_seconds
        if depth < len(self._nodes):
            node = self._nodes[depth]
            self._after(latency, lambda: node.take_release(count))
        else:
            self._after(latency, lambda: self.wafer_released.raise_to(count))

    def take_down(self, depth: int, group: plan_pb2.Group) -> None:
        """A frame from above is there."""
        if depth < len(self._nodes):
            self._nodes[depth].take_down(group)
        else:
            self._cluster.arrived(self._cluster.wafer, group.id).add()

    def below(self, depth: int) -> Host:
        """Who stands for the children of a node of this level."""
        return self._nodes[depth + 1].host if depth + 1 < len(self._nodes) else self._cluster.wafer

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._cluster.clock.at(self._cluster.clock.now + seconds, call)


class _Node:
    """What stands for the nodes of a level."""

    def __init__(self, tree: Tree, cluster: Cluster, depth: int) -> None:
        self.host = cluster.nodes[depth]
        self._tree = tree
        self._cluster = cluster
        self._depth = depth
        self._level = cluster.levels[depth]
        self._frame_seconds = cluster.rates.frame_seconds
        self._counts = ArenaCounts(cluster.plan.swarmx.arena)
        self._adds = self._level.children > 1
        self._inbox: deque[Callable[[], Process]] = deque()
        self._came = Count(cluster.clock)
        self._complete: deque[tuple[int, plan_pb2.Group, int]] = deque()  # the count that each awaits
        self._released = 0
        self._joined = 0

    def run(self) -> Process:
        """The node's thread."""
        handled = 0
        while True:
            handled += 1
            yield self._came, handled
            yield from self._inbox.popleft()()

    def take_down(self, group: plan_pb2.Group) -> None:
        self._put(lambda: self._pass_down(group, received=1))

    def take_up(self, group: plan_pb2.Group, step: int) -> None:
        self._put(lambda: self._collect(group, step))

    def take_credit(self, passed_on: Callable[[], None]) -> None:
        self._put(lambda: self._pass_credit(passed_on))

    def take_release(self, count: int) -> None:
        self._put(lambda: self._take_release(count))

    def _put(self, work: Callable[[], Process]) -> None:
        self._inbox.append(work)
        self._came.add()

    def _pass_down(self, group: plan_pb2.Group, received: int) -> Process:
        children = self._level.children
        yield self.host.work((received + children) * self._frame_seconds)
        self._cluster.carry(
            self.host,
            self._tree.below(self._depth),
            self._whole_bytes(group),
            lambda: self._tree.take_down(self._depth + 1, group),
            copies=children,
        )

    def _pass_credit(self, passed_on: Callable[[], None]) -> Process:
        yield self.host.work((self._level.children + 1) * self._frame_seconds)
        passed_on()

    def _take_release(self, count: int) -> Process:
        yield self.host.work(self._frame_seconds)
        if count <= self._released:
            return
        self._released = count
        if self._adds:
            yield from self._join_complete()
        else:
            self._tree.tell_released(self._depth + 1, count)

    def _collect(self, group: plan_pb2.Group, step: int) -> Process:
        yield self.host.work(self._level.children * self._frame_seconds)
        awaited = self._counts.awaited(group.id) if self._adds else None
        if awaited is None:
            yield from self._join(group, step)
        else:
            self._complete.append((self._counts.count(awaited, step), group, step))
            yield from self._join_complete()

    def _join_complete(self) -> Process:
        while self._complete and self._complete[0][0] <= self._released:
            _, group, step = self._complete.popleft()
            yield from self._join(group, step)
            self._joined += 1
            yield self.host.work(self._level.children * self._frame_seconds)
            self._tree.tell_released(self._depth + 1, self._joined)

    def _join(self, group: plan_pb2.Group, step: int) -> Process:
        if self._adds:
            nbytes = self._level.children * self._child_bytes(group)
            yield self.host.work(nbytes / self._cluster.rates.swarmx_bytes_per_second)
        joined = self._child_bytes(group)
        if group.reduction == plan_pb2.REDUCTION_GATHER:
            joined *= self._level.children
        if self._depth:
            yield self.host.work(self._frame_seconds)
            self._tree.enter_from_below(self._depth - 1, self.host, group, step, joined)
            return
        for shard in group.shards:
            yield self.host.work(self._frame_seconds)
            receiver = self._cluster.shards[shard]
            self._cluster.carry(self.host, receiver, joined, self._cluster.arrived(receiver, group.id).add)
        if group.to_wafers:
            yield from self._pass_down(group, received=0)

    def _child_bytes(self, group: plan_pb2.Group) -> int:
        parts = self._level.wafers if group.reduction == plan_pb2.REDUCTION_GATHER else 1
        return part_bytes(group) * parts

    def _whole_bytes(self, group: plan_pb2.Group) -> int:
        if group.reduction != plan_pb2.REDUCTION_GATHER:
            return group.nbytes
        return part_bytes(group) * self._cluster.levels[0].wafers * self._cluster.levels[0].children

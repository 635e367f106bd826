"""The roles in a simulation: the SwarmX trees, wafers and MemoryX shards, each following its program in the plan.

Each function mirrors the program of a real role: `swarmx/tree_part.py`, `wafer/wafer_program.py`,
`memoryx/memoryx_program.py`. A change of the order of messages there needs the same change here.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from waferbox.prediction.simulation import Count, Process, SimulatedCluster, SimulatedRole
from waferbox.runtime.arena import ArenaCounts, ArenaOrder
from waferbox.runtime.loops import in_order
from waferbox.runtime.schedule import WEIGHTS_CREDIT_BATCH, WEIGHTS_WINDOW, is_for_coordinator_only, part_bytes
from waferbox.runtime.swarmx_trees import tree_of
from wsc.v1 import plan_pb2

# --- SwarmX -----------------------------------------------------------------------------------------------------------


class Trees:
    """The SwarmX trees of a simulated cluster. Wafers and shards send a frame by the tree that carries its group."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        numbers = range(len(cluster.nodes))
        self._by_shard = [shard % len(numbers) for shard in range(len(cluster.shards))]
        groups: dict[int, list[plan_pb2.Group]] = {number: [] for number in numbers}
        for group in cluster.plan.swarmx.groups:
            groups[tree_of(group, self._by_shard)].append(group)
        self._trees = [Tree(cluster, number, groups[number]) for number in numbers]
        # How many gradient groups' buffers a wafer may write again: each of these says so.
        self.wafer_released = [tree.wafer_released for tree in self._trees if tree.carries_gradients]

    def send_weights(self, shard: int, group: plan_pb2.Group) -> None:
        """Sends a weights group from a shard to all wafers."""
        self._of(group).send_weights(shard, group)

    def send_up(self, group: plan_pb2.Group, step: int) -> None:
        """Sends a reduction group from every wafer."""
        self._of(group).send_up(group, step)

    def send_credit(self, shard: int, taken: int) -> None:
        """Sends the number of weights groups of a shard that each wafer has taken, to the shard."""
        self._trees[self._by_shard[shard]].send_credit(shard, taken)

    def release(self, shard: int, count: int) -> None:
        """Sends a shard's release count: it has read its part of the first `count` gradient groups."""
        for tree in self._trees:
            tree.release(shard, count)

    def _of(self, group: plan_pb2.Group) -> "Tree":
        return self._trees[tree_of(group, self._by_shard)]


class Tree:
    """A SwarmX tree of a simulated cluster: one simulated node for each level; none for a single wafer.

    Frames enter from the wafers below and from the shards above.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, groups: Sequence[plan_pb2.Group]) -> None:
        """
        Args:
            cluster: the cluster.
            number: of the tree.
            groups: those that it carries.
        """
        counts = ArenaCounts(cluster.plan.swarmx.arena)
        gradients = [group for group in groups if group.id in counts.offsets]
        self.wafer_released = Count(cluster.clock)  # gradient groups whose buffer a wafer may write again
        self.carries_gradients = bool(gradients)
        self._cluster = cluster
        order = counts.order_of(group.id for group in gradients)
        self._nodes = [_TreeLevel(self, cluster, number, depth, order) for depth in range(len(cluster.levels))]
        for node in self._nodes:
            cluster.clock.start(node.run())
        self._released_by_shard = counts.first_counts(gradients)
        self.wafer_released.raise_to(order.number(0))

    def send_weights(self, shard: int, group: plan_pb2.Group) -> None:
        """Sends a weights group from a shard to all wafers."""
        sender, receiver = self._cluster.shards[shard], self.below(-1)
        self._cluster.carry(sender, receiver, group.nbytes, lambda: self.take_down(0, group))

    def send_up(self, group: plan_pb2.Group, step: int) -> None:
        """Sends a reduction group from every wafer."""
        self.enter_from_below(len(self._nodes) - 1, self._cluster.wafer, group, step, part_bytes(group))

    def send_to_shard(self, sender: SimulatedRole, shard: int, group: plan_pb2.Group, nbytes: int) -> None:
        """Sends a reduced group from the root, or from a single wafer, to a shard."""
        receiver = self._cluster.shards[shard]
        self._cluster.carry(sender, receiver, nbytes, self._cluster.arrived(receiver, group.id).add)

    def enter_from_below(
        self, depth: int, sender: SimulatedRole, group: plan_pb2.Group, step: int, nbytes: int
    ) -> None:
        """Sends a group to a node of a level, from each of its children; from a single wafer to where it goes."""
        if depth < 0:
            for shard in group.shards:
                self.send_to_shard(sender, shard, group, nbytes)
            if group.to_wafers:
                self.take_down(0, group)
            return
        node = self._nodes[depth]
        self._cluster.carry(
            sender, node.host, nbytes, lambda: node.take_up(group, step), senders=self._cluster.levels[depth].children
        )

    def send_credit(self, shard: int, taken: int) -> None:
        """Sends the number of weights groups of a shard that each wafer has taken, to the shard."""
        self._pass_credit(len(self._nodes) - 1, shard, taken)

    def _pass_credit(self, depth: int, shard: int, taken: int) -> None:
        latency = self._cluster.rates.latency_seconds
        if depth < 0:
            self._after(latency, lambda: self._cluster.credit[shard].raise_to(taken))
            return
        node = self._nodes[depth]
        self._after(latency, lambda: node.take_credit(lambda: self._pass_credit(depth - 1, shard, taken)))

    def release(self, shard: int, count: int) -> None:
        """Sends a shard's release count: it has read its part of the first `count` gradient groups."""

        def arrive() -> None:
            self._released_by_shard[shard] = max(self._released_by_shard[shard], count)
            self._take_release(0, min(self._released_by_shard.values()))

        if shard in self._released_by_shard:
            self._after(self._cluster.rates.latency_seconds, arrive)

    def notify_released(self, depth: int, count: int) -> None:
        """Sends a release count to the nodes of a level; below the last level, to the wafers."""
        self._after(self._cluster.rates.latency_seconds, lambda: self._take_release(depth, count))

    def _take_release(self, depth: int, count: int) -> None:
        if depth < len(self._nodes):
            self._nodes[depth].take_release(count)
        else:
            self.wafer_released.raise_to(count)

    def take_down(self, depth: int, group: plan_pb2.Group) -> None:
        """Delivers a frame from above to a level; below the last level, to the wafers."""
        if depth < len(self._nodes):
            self._nodes[depth].take_down(group)
        else:
            self._cluster.arrived(self._cluster.wafer, group.id).add()

    def below(self, depth: int) -> SimulatedRole:
        """The simulated role that represents the children of a node of this level."""
        return self._nodes[depth + 1].host if depth + 1 < len(self._nodes) else self._cluster.wafer

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._cluster.clock.at(self._cluster.clock.now + seconds, call)


class _TreeLevel:
    """The nodes of one level, represented by one node with one thread, which handles frames in order of arrival."""

    def __init__(self, tree: Tree, cluster: SimulatedCluster, number: int, depth: int, order: ArenaOrder) -> None:
        """
        Args:
            tree: the tree.
            cluster: the cluster.
            number: of the tree.
            depth: of the level, from 0 at the root.
            order: of the tree's gradient groups.
        """
        self.host = cluster.nodes[number][depth]
        self._order = order
        self._tree = tree
        self._cluster = cluster
        self._depth = depth
        self._level = cluster.levels[depth]
        self._frame_seconds = cluster.rates.frame_seconds
        self._counts = ArenaCounts(cluster.plan.swarmx.arena)
        self._adds = self._level.children > 1
        self._inbox: deque[Callable[[], Process]] = deque()
        self._num_received = Count(cluster.clock)
        # Groups that all children have sent, each with the release count that it awaits, and with its step.
        self._complete: deque[tuple[int, plan_pb2.Group, int]] = deque()
        self._released = order.number(0)  # Groups of other trees may come before the first of this one.
        self._joined = 0

    def run(self) -> Process:
        """The node's thread."""
        handled = 0
        while True:
            handled += 1
            yield self._num_received, handled
            yield from self._inbox.popleft()()

    def take_down(self, group: plan_pb2.Group) -> None:
        self._put(lambda: self._pass_down(group, received=1))

    def take_up(self, group: plan_pb2.Group, step: int) -> None:
        self._put(lambda: self._collect(group, step))

    def take_credit(self, pass_on: Callable[[], None]) -> None:
        self._put(lambda: self._pass_credit(pass_on))

    def take_release(self, count: int) -> None:
        self._put(lambda: self._take_release(count))

    def _put(self, work: Callable[[], Process]) -> None:
        self._inbox.append(work)
        self._num_received.add()

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

    def _pass_credit(self, pass_on: Callable[[], None]) -> Process:
        yield self.host.work((self._level.children + 1) * self._frame_seconds)
        pass_on()

    def _take_release(self, count: int) -> Process:
        yield self.host.work(self._frame_seconds)
        if count <= self._released:
            return
        self._released = count
        if self._adds:
            yield from self._join_complete()
        else:
            self._tree.notify_released(self._depth + 1, count)

    def _collect(self, group: plan_pb2.Group, step: int) -> Process:
        yield self.host.work(self._level.children * self._frame_seconds)
        window = self._counts.window(group.id) if self._adds else None
        if window is None:
            yield from self._join(group, step)
        else:
            number = self._order.number(self._joined + len(self._complete))
            self._complete.append((number - window, group, step))
            yield from self._join_complete()

    def _join_complete(self) -> Process:
        # In order: a group that waits for its buffer holds up those behind it, as in a real node.
        while self._complete and self._complete[0][0] <= self._released:
            _, group, step = self._complete.popleft()
            yield from self._join(group, step)
            self._joined += 1
            yield self.host.work(self._level.children * self._frame_seconds)
            self._tree.notify_released(self._depth + 1, self._order.number(self._joined))

    def _join(self, group: plan_pb2.Group, step: int) -> Process:
        """Adds the children's parts, or puts them together, and sends the result on."""
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
            self._tree.send_to_shard(self.host, shard, group, joined)
        if group.to_wafers:
            yield from self._pass_down(group, received=0)

    def _child_bytes(self, group: plan_pb2.Group) -> int:
        parts = self._level.wafers if group.reduction == plan_pb2.REDUCTION_GATHER else 1
        return part_bytes(group) * parts

    def _whole_bytes(self, group: plan_pb2.Group) -> int:
        if group.reduction != plan_pb2.REDUCTION_GATHER:
            return group.nbytes
        return part_bytes(group) * self._cluster.levels[0].wafers * self._cluster.levels[0].children


# --- Wafers and MemoryX -----------------------------------------------------------------------------------------------


def run_wafer(cluster: SimulatedCluster, trees: Trees, num_steps: int) -> Process:
    """The thread of a wafer. A batch is always available, as workers run ahead."""
    plan, host, frame_seconds = cluster.plan.wafer, cluster.wafer, cluster.rates.frame_seconds
    groups = {group.id: group for group in plan.groups}
    homes = {member.value: group.id for group in plan.groups for member in group.members if _is_sent(group)}
    counts = ArenaCounts(plan.arena)
    received: dict[int, int] = defaultdict(int)
    taken: dict[int, int] = defaultdict(int)
    for step in range(1, num_steps + 1):
        for instruction, repetition in in_order(plan.instructions, plan.loop):
            match instruction.WhichOneof("kind"):
                case "receive":
                    group = groups[instruction.receive.group]
                    if group.kind == plan_pb2.GROUP_KIND_BATCH:
                        continue
                    received[group.id] += 1
                    yield cluster.arrived(host, group.id), received[group.id]
                    yield frame_seconds
                    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                        shard = group.source_shard
                        taken[shard] += 1
                        if taken[shard] % WEIGHTS_CREDIT_BATCH == 0:
                            yield frame_seconds
                            trees.send_credit(shard, taken[shard])
                case "run":
                    written = {homes[value] for value in instruction.run.outputs if value in homes}
                    for count in sorted(c for group in written if (c := counts.awaited(group)) is not None):
                        for released in trees.wafer_released:
                            yield released, counts.count(count, step, repetition)
                    yield host.work(cluster.costs.wafer[instruction.run.kernel])
                case "send":
                    group = groups[instruction.send.group]
                    awaited = counts.awaited(group.id)
                    if awaited is not None:
                        for released in trees.wafer_released:
                            yield released, counts.count(awaited, step, repetition)
                    yield frame_seconds
                    if not is_for_coordinator_only(group):
                        trees.send_up(group, step)
        cluster.step_ends.append(cluster.clock.now)


def run_shard(cluster: SimulatedCluster, trees: Trees, shard: int, num_steps: int) -> Process:
    """The thread of a MemoryX shard."""
    plan, host, frame_seconds = cluster.plan.memoryx[shard], cluster.shards[shard], cluster.rates.frame_seconds
    groups = {group.id: group for group in plan.groups}
    counts = ArenaCounts(plan.arena)
    received: dict[int, int] = defaultdict(int)
    taken = [i.receive.group for i in plan.instructions if i.HasField("receive")]
    released_counts = counts.released_counts(counts.offsets.keys() & set(taken))
    borrowed: tuple[int, int] | None = None  # the group that is not released yet, and its repetition
    sent = 0

    def release(step: int) -> None:
        nonlocal borrowed
        count = released_counts[borrowed[0]][borrowed[1]] if borrowed is not None else 0
        borrowed = None
        if count:
            trees.release(shard, counts.count(count, step))

    for step in range(1, num_steps + 1):
        for instruction, repetition in in_order(plan.instructions, plan.loop):
            match instruction.WhichOneof("kind"):
                case "receive":
                    release(step)
                    group = groups[instruction.receive.group]
                    received[group.id] += 1
                    yield cluster.arrived(host, group.id), received[group.id]
                    yield host.work(frame_seconds)
                    borrowed = (group.id, repetition) if group.id in counts.offsets else None
                case "run":
                    yield host.work(cluster.costs.memoryx[shard][instruction.run.kernel])
                case "send":
                    release(step)
                    group = groups[instruction.send.group]
                    yield host.work(frame_seconds)
                    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                        # At most WEIGHTS_WINDOW groups are under way that the wafers have not taken.
                        yield cluster.credit[shard], sent - WEIGHTS_WINDOW + 1
                        sent += 1
                        trees.send_weights(shard, group)
                    elif group.kind == plan_pb2.GROUP_KIND_EXCHANGE:
                        for other in group.shards:
                            if other != shard:
                                receiver = cluster.shards[other]
                                arrive = cluster.arrived(receiver, group.id).add
                                cluster.carry(host, receiver, group.nbytes, arrive)
        release(step)


def _is_sent(group: plan_pb2.Group) -> bool:
    return group.kind == plan_pb2.GROUP_KIND_REDUCTION

"""A SwarmX node's part of one tree: it passes weights down to its children, and reduces the groups that they send.

Between hosts it passes chunks on, and adds them, while the rest of their group arrives (cut-through).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from swarmx.reduction_groups import Collector, Joined, ReleaseNotifier, Releases, child_bytes, joined_bytes
from waferbox.links.elements import aligned
from waferbox.links.hub import Hub
from waferbox.links.link import Link, LinkLost, Message
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.schedule import CREDIT_GROUPS, is_for_coordinator_only, is_received_by_wafers
from wsc.v1 import plan_pb2

Handler = Callable[[Message], None]


class Handlers:
    """The handlers of a node's frames, by link and group, and the groups that are left. Used by one thread."""

    def __init__(self) -> None:
        self.left = 0  # groups to be passed on or joined in the epoch
        # With the bytes of the group, and whether the handler takes chunks.
        self._handlers: dict[Link, dict[int, tuple[int, Handler, bool]]] = defaultdict(dict)

    def add(self, link: Link, group: int, nbytes: int, handler: Handler, *, by_chunk: bool = False) -> None:
        """Sets the handler of a group's frames of so many bytes. by_chunk: it takes each chunk as it arrives."""
        self._handlers[link][group] = nbytes, handler, by_chunk

    def by_chunk(self, link: Link) -> Collection[int]:
        """Returns the groups of a link whose chunks are handled as they arrive."""
        return {group for group, (_, _, by_chunk) in self._handlers[link].items() if by_chunk}

    def sizes(self, link: Link) -> dict[int, int]:
        """Returns the bytes of each group that the link may bring."""
        return {group: nbytes for group, (nbytes, _, _) in self._handlers[link].items()}

    def handle(self, message: Message) -> None:
        """Handles a frame. Raises LinkLost: the link may not bring it."""
        nbytes, handler, _ = self._handlers[message.link].get(message.group, (None, None, False))
        if handler is None or nbytes != message.group_bytes:
            raise LinkLost(message.link.name, f"it sent group {message.group} with {message.group_bytes} bytes")
        handler(message)

    def clear(self) -> None:
        """Drops all handlers."""
        self._handlers.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A gradient group that the first child has begun to send, in one repetition.

    awaited: the count of released groups at which the group has a place.
    """

    awaited: int
    collector: Collector
    send: Callable[[Joined], None]


class TreePart:
    """A node's part of one tree, with the shared memory of its results. Used by the thread of the steps.

    Weights are bounded from end to end: the children report the groups that they have taken, and MemoryX is granted the
    least number. Gradients are bounded the other way: a group is joined once its place in this node's arena is
    released, and the children get the count of joined groups.
    """

    def __init__(
        self,
        *,
        plan: plan_pb2.SwarmXPlan,
        groups: Sequence[plan_pb2.Group],
        children: Sequence[Link],
        wafers_below: Sequence[int],
        first_wafer: int,
        parent: Link | None,
        shards: dict[int, Link],
        coordinator: Link | None,
        hub: Hub,
        handlers: Handlers,
    ) -> None:
        """Adds the handlers of the tree's frames.

        Args:
            plan: of the node.
            groups: those of the plan that the tree carries.
            children: the links to them, in the order of their wafers.
            wafers_below: the number of wafers at or below each.
            first_wafer: the number of the first wafer below this node.
            parent: the link towards the root; None: the node is the root.
            shards: the root's links, by shard.
            coordinator: the root's link, if the tree carries outputs.
            hub: of all links.
            handlers: of the node.
        """
        self.every_step = 0  # groups that are passed on or joined in each step
        self.output_steps_only = 0
        self._hub = hub
        self._parent, self._shards, self._coordinator = parent, shards, coordinator
        self._children, self._wafers_below = children, wafers_below
        self._first_wafer = first_wafer if parent is None else 0  # the root alone puts the parts of wafers in order
        self._handlers = handlers
        self._outputs_leave: Callable[[int], bool] = lambda step: True
        self._times = dict(zip((group.id for group in plan.groups), plan.times, strict=True))
        self._broadcast(groups)
        reductions = [group for group in groups if group.kind == plan_pb2.GROUP_KIND_REDUCTION]
        self._counts = ArenaCounts(plan.arena)
        self._notifier = ReleaseNotifier(self._counts, self._notify_children)
        self._joins_gradients = len(children) > 1 or self._turns_bytes_to_references()
        self._released = self._receive_releases(reductions)
        self._begun: deque[_Begun] = deque()  # in the order in which they are joined
        self._order = self._counts.order_of(group.id for group in reductions)
        self._joined = 0
        self._memory = self._reduce(reductions)
        self._count_credit({group.source_shard for group in groups if group.kind == plan_pb2.GROUP_KIND_WEIGHTS})

    @property
    def above(self) -> Sequence[Link]:
        """The links from which weights come."""
        return [self._parent] if self._parent is not None else list(self._shards.values())

    def begin(self, outputs_leave: Callable[[int], bool], run_ahead_steps: int) -> None:
        """Begins an epoch. outputs_leave: whether groups for the coordinator travel in a step."""
        self._outputs_leave = outputs_leave
        if self._coordinator is not None:
            self._coordinator.limit_ahead(run_ahead_steps)
        # Groups of other trees may come before the first of this one.
        self._notifier.reached(self._order.number(0) if self._joins_gradients else self._released.count)

    def close(self) -> None:
        self._memory.close()

    # --- Down ---------------------------------------------------------------------------------------------------------

    def _broadcast(self, groups: Iterable[plan_pb2.Group]) -> None:
        """Adds handlers of groups for the wafers: from the parent or, at the root, weights from the shards."""
        for group in groups:
            if self._parent is not None:
                source = self._parent if is_received_by_wafers(group) else None
            else:
                is_weights = group.kind == plan_pb2.GROUP_KIND_WEIGHTS
                source = self._shards[group.source_shard] if is_weights else None
            if source is not None:
                self.every_step += self._times[group.id]
                self._handlers.add(source, group.id, group.nbytes, self._pass_down, by_chunk=True)

    def _pass_down(self, message: Message) -> None:
        for child in self._children:
            self._hub.forward(child, message)
        if message.is_last:
            self._handlers.left -= 1

    def _count_credit(self, shards: Iterable[int]) -> None:
        for shard in shards:
            taken = [0] * len(self._children)
            for child, link in enumerate(self._children):
                self._handlers.add(link, CREDIT_GROUPS + shard, 0, self._credit(shard, taken, child))

    def _credit(self, shard: int, taken: list[int], child: int) -> Handler:
        """Returns a handler of a child's count of taken weights groups, which grants the shard the least count."""
        nothing = Slice(self._memory, 0, 0)

        def credit(message: Message) -> None:
            before = min(taken)
            taken[child] = message.step
            now = min(taken)
            if now > before:
                if self._parent is not None:
                    self._hub.send(self._parent, message.group, now, nothing)
                else:
                    self._shards[shard].grant(now - before)

        return credit

    # --- Up -----------------------------------------------------------------------------------------------------------

    def _turns_bytes_to_references(self) -> bool:
        """Whether gradients arrive as bytes, and leave over a link that can send references."""
        return self._children[0].lane == "grpc" and any(link.lane != "grpc" for link in self.above)

    def _reduce(self, groups: Sequence[plan_pb2.Group]) -> SharedMemory:
        """Adds handlers of reduction groups. Returns the shared memory of their results.

        It begins with the tree's part of the arena, which gradients share; the other groups follow.
        """
        offsets = {group.id: self._counts.offsets[group.id] for group in groups if group.id in self._counts.offsets}
        first = min(offsets.values(), default=0)
        ends = [offsets[group.id] + group.nbytes - first for group in groups if group.id in offsets]
        end = aligned(max(ends, default=0)) if self._joins_gradients else 0
        extents = []
        for group in groups:
            if group.id in offsets:
                extents.append((group, offsets[group.id] - first))
            else:
                extents.append((group, end))
                end = aligned(end + joined_bytes(group, self._wafers_below))
        memory = SharedMemory.create(max(end, 1))
        for group, offset in extents:
            only_coordinator = is_for_coordinator_only(group)
            if only_coordinator:
                self.output_steps_only += 1
            else:
                self.every_step += self._times[group.id]
            by_chunk = False
            if len(self._children) == 1 and only_coordinator and self._coordinator is not None:
                handlers = [self._pass_to_coordinator(self._coordinator)]
            elif len(self._children) == 1 and not (group.id in offsets and self._joins_gradients):
                handlers = [self._pass_through(group)]
            else:
                by_chunk = not only_coordinator and group.reduction != plan_pb2.REDUCTION_GATHER
                collector = Collector(group, self._wafers_below, memory, offset, self._first_wafer)
                handlers = [self._collect(group, collector, child) for child in range(len(self._children))]
            for child, handler, wafers in zip(self._children, handlers, self._wafers_below, strict=True):
                self._handlers.add(child, group.id, child_bytes(group, wafers), handler, by_chunk=by_chunk)
        return memory

    def _targets(self, group: plan_pb2.Group) -> list[Link]:
        """Returns the links that a joined group is sent over, besides the coordinator's."""
        if self._parent is not None:
            return [self._parent]
        down = self._children if group.to_wafers else []
        return [*down, *(self._shards[shard] for shard in group.shards)]

    def _pass_through(self, group: plan_pb2.Group) -> Handler:
        """Returns a handler that forwards a single child's frame, as a reference if it is one."""
        targets = self._targets(group)
        coordinator = self._coordinator if group.to_coordinator else None

        def pass_through(message: Message) -> None:
            for link in targets:
                self._hub.forward(link, message)
            if coordinator is not None and self._outputs_leave(message.step):
                # As bytes: the coordinator may read the frame after the child has written its buffer again.
                copied = replace(message, memory=None, payload=message.view, stays_bytes=True)
                self._hub.forward(coordinator, copied, window="ack")
            self._handlers.left -= 1

        return pass_through

    def _pass_to_coordinator(self, coordinator: Link) -> Handler:
        """Returns a handler of a group for the coordinator alone, which arrives as bytes, when outputs leave."""

        def pass_through(message: Message) -> None:
            self._hub.forward(coordinator, message, window="ack")
            self._handlers.left -= 1

        return pass_through

    def _collect(self, group: plan_pb2.Group, collector: Collector, child: int) -> Handler:
        send = self._send_joined(group)
        window = self._counts.window(group.id)

        def collect(message: Message) -> None:
            collector.add(child, message)
            while collector.may_join():
                send(collector.join())

        def collect_in_turn(message: Message) -> None:
            collector.add(child, message)
            if child == 0 and message.begin == 0:
                number = self._order.number(self._joined + len(self._begun))
                self._begun.append(_Begun(awaited=number - (window or 0), collector=collector, send=send))
            self._join_begun()

        return collect if window is None else collect_in_turn

    def _send_joined(self, group: plan_pb2.Group) -> Callable[[Joined], None]:
        """Returns a function that sends what has been joined of a group, as soon as it may go."""
        hub, targets, group_id = self._hub, self._targets(group), group.id
        coordinator = self._coordinator if group.to_coordinator else None
        as_bytes = is_for_coordinator_only(group)

        def send(joined: Joined) -> None:
            is_whole = joined.begin == 0 and joined.is_last
            for link in targets:
                if is_whole:
                    hub.send(link, group_id, joined.step, joined.result, as_bytes=as_bytes)
                else:
                    hub.send_part(link, group_id, joined.step, joined.result, joined.begin, joined.end)
            if not joined.is_last:
                return
            if coordinator is not None and self._outputs_leave(joined.step):
                hub.send(coordinator, group_id, joined.step, joined.result, window="ack", as_bytes=True)
            self._handlers.left -= 1

        return send

    def _join_begun(self) -> None:
        """Joins the gradient groups whose places are released, and sends the count of complete ones to the children.

        All children send the groups in one order. So each is complete before anything of the next can be joined.
        """
        while self._begun and self._begun[0].awaited <= self._released.count:
            begun = self._begun[0]
            is_complete = False
            while not is_complete and begun.collector.may_join():
                joined = begun.collector.join()
                begun.send(joined)
                is_complete = joined.is_last
            if not is_complete:
                return
            self._begun.popleft()
            self._joined += 1
            self._notifier.reached(self._order.number(self._joined))

    # --- Released groups ----------------------------------------------------------------------------------------------

    def _receive_releases(self, groups: Sequence[plan_pb2.Group]) -> Releases[Link]:
        """Adds handlers of the counts that the receivers of this node's gradients send."""
        if self._parent is not None:
            in_arena = any(group.id in self._counts.offsets for group in groups)
            first = {self._parent: 0} if in_arena else {}
        else:
            counts = self._counts.first_counts(groups)
            first = {link: counts[shard] for shard, link in self._shards.items() if shard in counts}
        releases = Releases(first)
        if self._counts.credited:
            for link in first:
                self._handlers.add(link, RELEASED_GROUP, 0, self._take_release(releases))
        return releases

    def _take_release(self, releases: Releases[Link]) -> Handler:
        def take(message: Message) -> None:
            if not releases.add(message.link, message.step):
                return
            if self._joins_gradients:
                self._join_begun()
            else:
                self._notifier.reached(releases.count)

        return take

    def _notify_children(self, count: int) -> None:
        nothing = Slice(self._memory, 0, 0)
        for child in self._children:
            self._hub.send(child, RELEASED_GROUP, count, nothing)

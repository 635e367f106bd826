"""A SwarmX node's part of a job: it forwards weights to all children, and reduces the groups that the children send."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from waferbox.links.elements import aligned
from waferbox.links.hub import Hub
from waferbox.links.link import Link, LinkLost, Message
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.progress import Progress, Recorder, group_label
from waferbox.runtime.role_job import RoleJob
from waferbox.runtime.schedule import (
    CREDIT_GROUPS,
    StepSchedule,
    is_for_coordinator_only,
    is_received_by_wafers,
    part_bytes,
)
from wsc.v1 import node_pb2, plan_pb2

# --- Reduction groups -------------------------------------------------------------------------------------------------


def joined_bytes(group: plan_pb2.Group, wafers_below: Sequence[int]) -> int:
    """Returns the bytes of a group after its reduction."""
    parts = sum(wafers_below) if group.reduction == plan_pb2.REDUCTION_GATHER else 1
    return part_bytes(group) * parts


def child_bytes(group: plan_pb2.Group, wafers: int) -> int:
    """Returns the bytes of the frame of a child with so many wafers."""
    return joined_bytes(group, [wafers])


class Collector:
    """The frames of one reduction group until all children's have arrived. Used by one thread.

    Each child sends its frames in order. A child may be steps ahead of another, in groups for the coordinator, which no
    node awaits.
    """

    def __init__(self, group: plan_pb2.Group, wafers_below: Sequence[int], memory: SharedMemory, offset: int) -> None:
        """
        Args:
            group: the group.
            wafers_below: the number of wafers below each child, in order.
            memory: the shared memory of the result.
            offset: the offset of the result in it.
        """
        self._result = Slice(memory, offset, joined_bytes(group, wafers_below))
        self._num_children = len(wafers_below)
        self._parts: list[deque[Message]] = [deque() for _ in wafers_below]  # by child
        self._received = [0] * self._num_children
        if self._num_children > 1:
            # A node with one child adds nothing, and needs no torch.
            from swarmx.reduction import Join

            self._join = Join(group, [child_bytes(group, wafers) for wafers in wafers_below], self._result)

    def add(self, child: int, message: Message) -> bool:
        """Takes a child's frame. Returns whether all others have sent theirs, so that the group can be joined."""
        self._parts[child].append(message)
        before = min(self._received)
        self._received[child] += 1
        return min(self._received) > before

    def join(self) -> Slice:
        """Reduces the first frames of all children, and drops them. Returns the result."""
        parts = [frames.popleft() for frames in self._parts]
        if self._num_children == 1:
            self._result.view[:] = parts[0].view
        else:
            self._join(parts)
        return self._result


# --- Released gradient groups -----------------------------------------------------------------------------------------

Source = TypeVar("Source")


class Releases(Generic[Source]):
    """The count of groups that all receivers have released. It does not decrease. Used by one thread."""

    def __init__(self, first: Mapping[Source, int]) -> None:
        """first: the receivers, with the first count of each."""
        self._counts = dict(first)
        self.count = min(first.values(), default=0)

    def add(self, source: Source, count: int) -> bool:
        """Sets the count of a receiver. Returns whether the count of all has increased."""
        self._counts[source] = max(self._counts[source], count)
        before, self.count = self.count, min(self._counts.values())
        return self.count > before


class ReleaseNotifier:
    """Sends each awaited count to the children, once. Used by one thread."""

    def __init__(self, counts: ArenaCounts, notify: Callable[[int], None]) -> None:
        self._counts = counts
        self._notify = notify
        self._notified = 0

    def reached(self, count: int) -> None:
        """Sends the awaited counts up to the number of released groups."""
        for awaited in self._counts.awaited_between(self._notified, count):
            self._notify(awaited)
        self._notified = max(self._notified, count)


def first_counts(counts: ArenaCounts, groups: Sequence[plan_pb2.Group]) -> dict[int, int]:
    """Returns the count of each shard before it has released a group. Shards that receive no group have none."""
    by_shard: dict[int, list[int]] = {}
    for group in groups:
        if group.id in counts.offsets:
            for shard in group.shards:
                by_shard.setdefault(shard, []).append(group.id)
    return {shard: counts.first_of(own) for shard, own in by_shard.items()}


# --- The program ------------------------------------------------------------------------------------------------------


class SwarmXProgram:
    """The handlers of frames of one epoch, and the shared memory of their results. Used by the thread of the steps.

    The node handles frames as they arrive, and waits for none in particular. Only the coordinator's window, which
    bounds how far the cluster runs ahead of the client, delays it. Weights are bounded from end to end: the children
    report the groups that they have taken, and MemoryX is granted the least number. Gradients are bounded the other
    way: a complete group is joined when its place in this node's arena is released, and the children get the count of
    joined groups.
    """

    def __init__(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> None:
        self._hub = hub
        self._parent = links.get((node_pb2.LINK_PURPOSE_PARENT, 0))
        self._coordinator = links.get((node_pb2.LINK_PURPOSE_COORDINATOR, 0))
        self._shards = {i: link for (purpose, i), link in links.items() if purpose == node_pb2.LINK_PURPOSE_SHARD}
        specs = [spec for spec in request.links if spec.purpose == node_pb2.LINK_PURPOSE_CHILD]
        specs.sort(key=lambda spec: spec.index)
        self._children = [links[spec.purpose, spec.index] for spec in specs]
        self._wafers_below = [max(1, spec.num_wafers) for spec in specs]
        self._outputs_leave: Callable[[int], bool] = lambda step: True
        self._every_step = 0  # groups that are passed on or joined in each step
        self._output_steps_only = 0
        self._left = 0  # the sum of both that is left in the epoch
        self.progress = Progress("reduce")
        # The frames that each link may send: from above to be forwarded, from below to be joined.
        self._handlers: dict[tuple[Link, int], Callable[[Message], None]] = {}
        self._sizes: dict[tuple[Link, int], int] = {}
        groups = list(request.swarmx.groups)
        self._times = dict(zip((group.id for group in groups), request.swarmx.times, strict=True))
        self._labels = {group.id: group_label(group) for group in groups}
        self._broadcast(groups)
        reductions = [group for group in groups if group.kind == plan_pb2.GROUP_KIND_REDUCTION]
        self._counts = ArenaCounts(request.swarmx.arena)
        self._notifier = ReleaseNotifier(self._counts, self._notify_children)
        self._joins_gradients = len(self._children) > 1 or self._turns_bytes_to_references()
        self._released = self._receive_releases(reductions)
        # Complete groups, in the order in which they are joined: the count that each awaits, and a call that joins it.
        self._complete: deque[tuple[int, Callable[[], None]]] = deque()
        self._joined = 0
        arena_bytes = request.swarmx.arena.nbytes if self._joins_gradients else 0
        self._memory = self._reduce(reductions, arena_bytes)
        self._count_credit({group.source_shard for group in groups if group.kind == plan_pb2.GROUP_KIND_WEIGHTS})
        for link in links.values():
            link.expect({group: nbytes for (source, group), nbytes in self._sizes.items() if source is link})

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        """Handles frames until all groups of the epoch are forwarded or joined."""
        self._outputs_leave = schedule.outputs_leave
        self._left = self._every_step * schedule.num_steps + self._output_steps_only * schedule.num_output_steps
        if self._coordinator is not None:
            self._coordinator.limit_ahead(schedule.run_ahead_steps)
        handlers, sizes, hub, now = self._handlers, self._sizes, self._hub, time.perf_counter
        progress, in_all = self.progress, max(1, self._left)
        begin = done = now()
        try:
            while self._left:
                message = hub.wait()
                received = now()
                key = (message.link, message.group)
                if sizes.get(key) != message.nbytes:
                    raise LinkLost(message.link.name, f"it sent group {message.group} with {message.nbytes} bytes")
                handlers[key](message)
                progress.wait += received - done
                waited, done = done, now()
                progress.total = done - begin
                progress.step = schedule.global_step(schedule.num_steps * (in_all - self._left) // in_all)
                if progress.recorder is not None:
                    self._record(progress.recorder, schedule, message, waited, received, done)
        finally:
            progress.end_trace()
        return progress.seconds()

    def _record(
        self,
        recorder: Recorder,
        schedule: StepSchedule,
        message: Message,
        waited: float,
        received: float,
        done: float,
    ) -> None:
        label = self._labels.get(message.group)
        if label is not None:  # Counts of taken and released groups have no label.
            step = schedule.global_step(message.step)
            what = "broadcast" if message.link in self._above() else "reduce"
            recorder.add("wait", label, step, waited, received)
            recorder.add(what, label, step, received, done, group=message.group, source=message.link.name)
        if self.progress.step >= recorder.end:
            self.progress.end_trace()

    def interrupt(self) -> None:
        """Has no effect: all waits are the hub's."""

    def close(self) -> None:
        self._handlers.clear()
        self._memory.close()

    def _broadcast(self, groups: Iterable[plan_pb2.Group]) -> None:
        """Adds handlers of groups for the wafers: from the parent or, at the root, weights from the shards."""
        for group in groups:
            if self._parent is not None:
                source = self._parent if is_received_by_wafers(group) else None
            else:
                is_weights = group.kind == plan_pb2.GROUP_KIND_WEIGHTS
                source = self._shards[group.source_shard] if is_weights else None
            if source is not None:
                self._every_step += self._times[group.id]
                self._handlers[source, group.id] = self._pass_down
                self._sizes[source, group.id] = group.nbytes

    def _pass_down(self, message: Message) -> None:
        for child in self._children:
            self._hub.forward(child, message)
        self._left -= 1

    def _above(self) -> list[Link]:
        return [self._parent] if self._parent is not None else list(self._shards.values())

    def _turns_bytes_to_references(self) -> bool:
        """Whether gradients arrive as bytes, and leave over a link that can send references."""
        return self._children[0].lane == "grpc" and any(link.lane != "grpc" for link in self._above())

    def _reduce(self, groups: Iterable[plan_pb2.Group], arena_bytes: int) -> SharedMemory:
        """Adds handlers of reduction groups. Returns the shared memory of their results.

        It begins with the arena, which gradients share; the other groups follow.
        """
        extents = []
        end = arena_bytes
        for group in groups:
            if group.id in self._counts.offsets:
                extents.append((group, self._counts.offsets[group.id]))
            else:
                extents.append((group, end))
                end = aligned(end + joined_bytes(group, self._wafers_below))
        memory = SharedMemory.create(max(end, 1))
        for group, offset in extents:
            only_coordinator = is_for_coordinator_only(group)
            if only_coordinator:
                self._output_steps_only += 1
            else:
                self._every_step += self._times[group.id]
            if len(self._children) == 1 and only_coordinator and self._coordinator is not None:
                handlers = [self._pass_to_coordinator(self._coordinator)]
            elif len(self._children) == 1 and not (group.id in self._counts.offsets and self._joins_gradients):
                handlers = [self._pass_through(group)]
            else:
                collector = Collector(group, self._wafers_below, memory, offset)
                handlers = [self._collect(group, collector, child) for child in range(len(self._children))]
            for child, handler, wafers in zip(self._children, handlers, self._wafers_below, strict=True):
                self._handlers[child, group.id] = handler
                self._sizes[child, group.id] = child_bytes(group, wafers)
        return memory

    def _pass_through(self, group: plan_pb2.Group) -> Callable[[Message], None]:
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
            self._left -= 1

        return pass_through

    def _pass_to_coordinator(self, coordinator: Link) -> Callable[[Message], None]:
        """Returns a handler of a group for the coordinator alone, which arrives as bytes, when outputs leave."""

        def pass_through(message: Message) -> None:
            self._hub.forward(coordinator, message, window="ack")
            self._left -= 1

        return pass_through

    def _collect(self, group: plan_pb2.Group, collector: Collector, child: int) -> Callable[[Message], None]:
        hub, targets, group_id = self._hub, self._targets(group), group.id
        coordinator = self._coordinator if group.to_coordinator else None
        as_bytes = is_for_coordinator_only(group)

        def collect(message: Message) -> None:
            if collector.add(child, message):
                join(message.step)

        def join_and_send(step: int) -> None:
            joined = collector.join()
            for link in targets:
                hub.send(link, group_id, step, joined, as_bytes=as_bytes)
            if coordinator is not None and self._outputs_leave(step):
                hub.send(coordinator, group_id, step, joined, window="ack", as_bytes=True)
            self._left -= 1

        def join_in_turn(step: int) -> None:
            number = self._joined + len(self._complete)
            self._complete.append((number - (window or 0), lambda: join_and_send(step)))
            self._join_complete()

        window = self._counts.window(group_id)
        join = join_and_send if window is None else join_in_turn
        return collect

    def _join_complete(self) -> None:
        """Joins the complete gradient groups whose places are released, and sends the count to the children.

        All children send the groups in one order, so they are complete in this order.
        """
        while self._complete and self._complete[0][0] <= self._released.count:
            _, join = self._complete.popleft()
            join()
            self._joined += 1
            self._notifier.reached(self._joined)

    def _receive_releases(self, groups: Sequence[plan_pb2.Group]) -> Releases[Link]:
        """Adds handlers of the counts that the receivers of this node's gradients send."""
        if self._parent is not None:
            first = {self._parent: 0}
        else:
            counts = first_counts(self._counts, groups)
            first = {link: counts[shard] for shard, link in self._shards.items() if shard in counts}
        releases = Releases(first)
        if self._counts.credited:
            for link in first:
                self._handlers[link, RELEASED_GROUP] = self._take_release(releases)
                self._sizes[link, RELEASED_GROUP] = 0
        return releases

    def _take_release(self, releases: Releases[Link]) -> Callable[[Message], None]:
        def take(message: Message) -> None:
            if not releases.add(message.link, message.step):
                return
            if self._joins_gradients:
                self._join_complete()
            else:
                self._notifier.reached(releases.count)

        return take

    def _notify_children(self, count: int) -> None:
        nothing = Slice(self._memory, 0, 0)
        for child in self._children:
            self._hub.send(child, RELEASED_GROUP, count, nothing)

    def _targets(self, group: plan_pb2.Group) -> list[Link]:
        """Returns the links that a joined group is sent over, besides the coordinator's."""
        if self._parent is not None:
            return [self._parent]
        down = self._children if group.to_wafers else []
        return [*down, *(self._shards[shard] for shard in group.shards)]

    def _count_credit(self, shards: Iterable[int]) -> None:
        for shard in shards:
            taken = [0] * len(self._children)
            for child, link in enumerate(self._children):
                self._handlers[link, CREDIT_GROUPS + shard] = self._credit(shard, taken, child)
                self._sizes[link, CREDIT_GROUPS + shard] = 0

    def _credit(self, shard: int, taken: list[int], child: int) -> Callable[[Message], None]:
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


# --- The job ----------------------------------------------------------------------------------------------------------


class SwarmXJob(RoleJob):
    """A job on a SwarmX node, which keeps nothing between executions."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> SwarmXProgram:
        return SwarmXProgram(request, hub, links)

"""The order of each region's work: one forward, one backward.

Regions are played as they would run. A region takes a backward pass before a forward one, and the oldest micro-batch
first; it begins no new micro-batch while it has as many in flight as there are regions from it to the last. Updates are
what it does when nothing else is left; asynchronous ones it does at once. What others need of the whole batch (a
statistic over it) is done first, layer by layer, for all micro-batches.

Each region's list is its part of one order, in which everything comes behind what it waits for. So regions that run
their lists in order never wait in a circle: the first instruction in that order that has not been run can always be.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.pipelined.graph import RegionGraph, RegionWork, Side, WorkKind, earlier_updates

# In place of the number of a micro-batch, for what there is once.
SHARED = -1
Key = tuple[SSAValue, int]


@dataclass(slots=True, eq=False)
class Task:
    """A node, once: one instruction."""

    node: RegionWork
    region: int
    micro_batch: int  # of those of all replicas
    reads: list[Key]
    makes: list[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many regions a replica has, and how many micro-batches; and how many replicas there are."""

    regions: int
    replicas: int
    micro_batches: int

    def region(self, node: RegionWork, micro_batch: int) -> int:
        """The region, of all replicas', that does some work."""
        replica = micro_batch // self.micro_batches if node.of_each_micro_batch else node.replica
        return replica * self.regions + node.region


def order_tasks(graph: RegionGraph, layout: Layout) -> list[Task]:
    """All tasks in an order in which they can be run. CompileError if there is none."""
    tasks = _make_tasks(graph, layout)
    player = _Player(graph, tasks, layout)
    ordered = player.play()
    if len(ordered) < sum(map(len, tasks.values())):
        raise CompileError("states are replaced by views of one another's old values; clone them first")
    return ordered


def tasks_before(graph: RegionGraph, tasks: dict[RegionWork, list[Task]], num_regions: int) -> dict[Task, list[Task]]:
    """For each task those whose values it reads, and those that read what it overwrites."""
    makers: dict[Key, list[Task]] = defaultdict(list)
    for task in (task for listed in tasks.values() for task in listed):
        for key in task.makes:
            makers[key].append(task)
    earlier = earlier_updates(graph, num_regions)
    before = {}
    for node, listed in tasks.items():
        for task in listed:
            needed = dict.fromkeys(maker for key in task.reads for maker in makers.get(key, ()))
            if not node.repeated:
                needed.update((reader, None) for other in graph.before(node) for reader in tasks[other])
            else:
                # Of each micro-batch what is of it; what is done once reads what a step begins with.
                readers = (
                    tasks[other][task.micro_batch if other.of_each_micro_batch else 0] for other in graph.before(node)
                )
                needed.update(dict.fromkeys(readers))
                for other, distance in earlier[node]:
                    if task.micro_batch >= distance:
                        needed[tasks[other][task.micro_batch - distance]] = None
            before[task] = list(needed)
    return before


def _make_tasks(graph: RegionGraph, layout: Layout) -> dict[RegionWork, list[Task]]:
    tasks: dict[RegionWork, list[Task]] = {}
    micro_batches = layout.replicas * layout.micro_batches

    def keys(node: RegionWork, micro_batch: int, sides: Sequence[Side]) -> Iterator[Key]:
        for value, is_part in sides:
            if not is_part and value not in graph.repeated:
                yield value, SHARED
            elif node.of_each_micro_batch:
                yield value, micro_batch
            elif is_part:  # a message has the parts of all micro-batches
                yield from ((value, part) for part in range(micro_batches))
            else:
                yield value, micro_batches - 1

    for node in graph.nodes:
        tasks[node] = [
            Task(
                node,
                layout.region(node, micro_batch),
                micro_batch,
                list(keys(node, micro_batch, node.reads)),
                list(keys(node, micro_batch, node.makes)),
            )
            for micro_batch in (range(micro_batches) if node.of_each_micro_batch else [SHARED])
        ]
    return tasks


class _Player:
    """Plays the regions with predicted times; the order in which tasks begin is the result."""

    def __init__(self, graph: RegionGraph, tasks: dict[RegionWork, list[Task]], layout: Layout) -> None:
        self._layout = layout
        self._num_regions = num_regions = layout.replicas * layout.regions
        self._place = {node: number for number, node in enumerate(graph.nodes)}
        before = tasks_before(graph, tasks, layout.regions)
        self._missing = {task: len(needed) for task, needed in before.items()}
        self._followers: dict[Task, list[Task]] = defaultdict(list)
        for task, needed in before.items():
            for other in needed:
                self._followers[other].append(task)
        self._ready: list[list[Task]] = [[] for _ in range(num_regions)]
        for task, missing in self._missing.items():
            if not missing:
                self._ready[task.region].append(task)
        # By region and micro-batch: tasks of the backward pass that are still to be done, since it was begun.
        self._backward: dict[tuple[int, int], int] = defaultdict(int)
        for task in before:
            if task.node.kind is WorkKind.BACKWARD and not task.node.of_whole_batch:
                self._backward[task.region, task.micro_batch] += 1
        self._in_flight: list[set[int]] = [set() for _ in range(num_regions)]

    def play(self) -> list[Task]:
        """Tasks in the order of their beginnings; not all of them, if they wait in a circle."""
        order: list[Task] = []
        running: list[tuple[float, int, Task]] = []
        free = set(range(self._num_regions))
        now = 0.0
        while True:
            for region in sorted(free):
                # With nothing under way, what is held back is what all wait for.
                if (task := self._next(region, forced=False)) is not None:
                    self._begin(task, now, order, running)
                    free.discard(region)
            if not running:
                forced = (self._next(region, forced=True) for region in range(self._num_regions))
                task = next((task for task in forced if task is not None), None)
                if task is None:
                    return order
                self._begin(task, now, order, running)
                free.discard(task.region)
            now, _, done = heapq.heappop(running)
            self._end(done)
            free.add(done.region)

    def _next(self, region: int, *, forced: bool) -> Task | None:
        ready = self._ready[region]
        return min((task for task in ready if forced or self._may_begin(task)), key=self._rank, default=None)

    def _may_begin(self, task: Task) -> bool:
        node = task.node
        if node.kind is not WorkKind.FORWARD or node.of_whole_batch:
            return True
        flying = self._in_flight[task.region]
        begins = self._backward[task.region, task.micro_batch] > 0 and task.micro_batch not in flying
        return not begins or len(flying) < self._layout.regions - node.region

    def _rank(self, task: Task) -> tuple[int, int, int]:
        place = self._place[task.node]
        if task.node.of_whole_batch or task.node.repeated or task.node.kind is WorkKind.RECEIVE:
            return (WorkKind.RECEIVE, place, task.micro_batch)
        if task.node.is_segment:
            return (task.node.kind, task.micro_batch, place)
        return (task.node.kind, place, 0)

    def _begin(self, task: Task, now: float, order: list[Task], running: list[tuple[float, int, Task]]) -> None:
        node = task.node
        self._ready[task.region].remove(task)
        if node.kind is WorkKind.FORWARD and not node.of_whole_batch and self._backward[task.region, task.micro_batch]:
            self._in_flight[task.region].add(task.micro_batch)
        heapq.heappush(running, (now + node.seconds, len(order), task))
        order.append(task)

    def _end(self, task: Task) -> None:
        node = task.node
        if node.kind is WorkKind.BACKWARD and not node.of_whole_batch:
            self._backward[task.region, task.micro_batch] -= 1
            if not self._backward[task.region, task.micro_batch]:
                self._in_flight[task.region].discard(task.micro_batch)
        for follower in self._followers[task]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready[follower.region].append(follower)

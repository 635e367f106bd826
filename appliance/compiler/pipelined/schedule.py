"""The order of each region's work: one forward, one backward.

The compiler simulates the regions with predicted times. A region prefers a backward pass to a forward one, and the
oldest micro-batch. It begins no new micro-batch while it has as many in flight as there are regions from it to the
last: more would take memory and gain nothing. Updates are done when nothing else is left; asynchronous ones at once.
Work that others need for the whole batch, such as its statistics, comes first, layer by layer, for all micro-batches.

Each region's list is its part of one order of all tasks, in which every task comes after those it waits for. So regions
that run their lists in order cannot wait in a circle: the first task of that order that has not been run can be run.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.pipelined.graph import RegionGraph, RegionWork, Side, WorkKind, earlier_updates

# Instead of the number of a micro-batch: the value or task exists once.
SHARED = -1
# A value, and the number of its micro-batch.
Key = tuple[SSAValue, int]


@dataclass(slots=True, eq=False)
class Task:
    """Work that is done once, or its share of one micro-batch: one instruction of a region.

    Attributes:
        work: the work.
        region: number of the region, over all replicas.
        micro_batch: number of the micro-batch, over all replicas; SHARED: the work is done once.
        reads: the values that it reads.
        makes: the values that it makes.
    """

    work: RegionWork
    region: int
    micro_batch: int
    reads: list[Key]
    makes: list[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of a pipeline.

    Attributes:
        regions: regions of each replica.
        replicas: number of replicas.
        micro_batches: micro-batches of each replica.
    """

    regions: int
    replicas: int
    micro_batches: int

    def region(self, item: RegionWork, micro_batch: int) -> int:
        """Number, over all replicas, of the region that does the work."""
        replica = micro_batch // self.micro_batches if item.of_each_micro_batch else item.replica
        return replica * self.regions + item.region


def order_tasks(graph: RegionGraph, layout: Layout) -> list[Task]:
    """All tasks in an order in which they can be run.

    Raises:
        CompileError: there is no such order.
    """
    tasks = _make_tasks(graph, layout)
    simulator = _Simulator(graph, tasks, layout)
    ordered = simulator.run()
    if len(ordered) < sum(map(len, tasks.values())):
        raise CompileError("states are replaced by views of one another's old values; clone them first")
    return ordered


def tasks_before(graph: RegionGraph, tasks: dict[RegionWork, list[Task]], num_regions: int) -> dict[Task, list[Task]]:
    """By task: the tasks that make the values it reads, and those that read what it overwrites."""
    makers: dict[Key, list[Task]] = defaultdict(list)
    for task in (task for listed in tasks.values() for task in listed):
        for key in task.makes:
            makers[key].append(task)
    earlier = earlier_updates(graph, num_regions)
    before = {}
    for item, listed in tasks.items():
        for task in listed:
            needed = dict.fromkeys(maker for key in task.reads for maker in makers.get(key, ()))
            if not item.repeated:
                needed.update((reader, None) for other in graph.before(item) for reader in tasks[other])
            else:
                # Readers that are repeated read the state of their own micro-batch; readers that run once, the state
                # at the beginning of the step.
                readers = (
                    tasks[other][task.micro_batch if other.of_each_micro_batch else 0] for other in graph.before(item)
                )
                needed.update(dict.fromkeys(readers))
                for other, distance in earlier[item]:
                    if task.micro_batch >= distance:
                        needed[tasks[other][task.micro_batch - distance]] = None
            before[task] = list(needed)
    return before


def _make_tasks(graph: RegionGraph, layout: Layout) -> dict[RegionWork, list[Task]]:
    tasks: dict[RegionWork, list[Task]] = {}
    micro_batches = layout.replicas * layout.micro_batches

    def keys(item: RegionWork, micro_batch: int, sides: Sequence[Side]) -> Iterator[Key]:
        for value, is_part in sides:
            if not is_part and value not in graph.repeated:
                yield value, SHARED
            elif item.of_each_micro_batch:
                yield value, micro_batch
            elif is_part:  # a message has the parts of all micro-batches
                yield from ((value, part) for part in range(micro_batches))
            else:  # the last micro-batch's value of repeated work is the step's
                yield value, micro_batches - 1

    for item in graph.work:
        tasks[item] = [
            Task(
                item,
                layout.region(item, micro_batch),
                micro_batch,
                list(keys(item, micro_batch, item.reads)),
                list(keys(item, micro_batch, item.makes)),
            )
            for micro_batch in (range(micro_batches) if item.of_each_micro_batch else [SHARED])
        ]
    return tasks


class _Simulator:
    """Simulates the regions with predicted times; the order in which tasks begin is the result."""

    def __init__(self, graph: RegionGraph, tasks: dict[RegionWork, list[Task]], layout: Layout) -> None:
        self._layout = layout
        self._num_regions = num_regions = layout.replicas * layout.regions
        self._place = {item: number for number, item in enumerate(graph.work)}
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
        # By region and micro-batch: tasks of the backward pass that are still to be done.
        self._backward: dict[tuple[int, int], int] = defaultdict(int)
        for task in before:
            if task.work.kind is WorkKind.BACKWARD and not task.work.of_whole_batch:
                self._backward[task.region, task.micro_batch] += 1
        self._in_flight: list[set[int]] = [set() for _ in range(num_regions)]

    def run(self) -> list[Task]:
        """The tasks in the order in which they begin; fewer than all if they wait in a circle."""
        order: list[Task] = []
        running: list[tuple[float, int, Task]] = []
        free = set(range(self._num_regions))
        now = 0.0
        while True:
            for region in sorted(free):
                if (task := self._next(region, forced=False)) is not None:
                    self._begin(task, now, order, running)
                    free.discard(region)
            if not running:
                # Nothing runs, so all wait for a forward pass that is held back: one is begun beyond the limit.
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
        """The task that a region prefers. forced: regardless of the limit of micro-batches in flight."""
        ready = self._ready[region]
        return min((task for task in ready if forced or self._may_begin(task)), key=self._rank, default=None)

    def _may_begin(self, task: Task) -> bool:
        item = task.work
        if item.kind is not WorkKind.FORWARD or item.of_whole_batch:
            return True
        flying = self._in_flight[task.region]
        begins = self._backward[task.region, task.micro_batch] > 0 and task.micro_batch not in flying
        return not begins or len(flying) < self._layout.regions - item.region

    def _rank(self, task: Task) -> tuple[int, int, int]:
        place = self._place[task.work]
        if task.work.of_whole_batch or task.work.repeated or task.work.kind is WorkKind.RECEIVE:
            return (WorkKind.RECEIVE, place, task.micro_batch)
        if task.work.is_segment:
            return (task.work.kind, task.micro_batch, place)
        return (task.work.kind, place, 0)

    def _begin(self, task: Task, now: float, order: list[Task], running: list[tuple[float, int, Task]]) -> None:
        item = task.work
        self._ready[task.region].remove(task)
        if item.kind is WorkKind.FORWARD and not item.of_whole_batch and self._backward[task.region, task.micro_batch]:
            self._in_flight[task.region].add(task.micro_batch)
        heapq.heappush(running, (now + item.seconds, len(order), task))
        order.append(task)

    def _end(self, task: Task) -> None:
        item = task.work
        if item.kind is WorkKind.BACKWARD and not item.of_whole_batch:
            self._backward[task.region, task.micro_batch] -= 1
            if not self._backward[task.region, task.micro_batch]:
                self._in_flight[task.region].discard(task.micro_batch)
        for follower in self._followers[task]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready[follower.region].append(follower)

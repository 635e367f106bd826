"""A simulated cluster: discrete events, the rates of its parts, how long kernels take, and links with frames on their
way.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from appliance.compiler.cost.kernel_profile import loop_time, operations_time
from appliance.compiler.cost.machine_model import MachineModel
from waferbox.cirh.text.parser import parse_module
from waferbox.lair.lower import NotLowered, lower
from wsc.v1 import plan_pb2

# --- A simulation of discrete events: processes that wait for time to pass, or for a count to be reached --------------


# What a process yields: seconds that go by, or a count with the value that it waits for.
Wait: TypeAlias = "float | tuple[Count, int]"
Process: TypeAlias = Iterator[Wait]


class Count:
    """A number that only grows, and who waits for it."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._waiting: list[tuple[int, Process]] = []
        self.value = 0

    def add(self) -> None:
        """One more."""
        self.raise_to(self.value + 1)

    def raise_to(self, value: int) -> None:
        """At least so many."""
        if value <= self.value:
            return
        self.value = value
        ready = [process for awaited, process in self._waiting if awaited <= value]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > value]
        for process in ready:
            self._clock.start(process)

    def wait(self, value: int, process: Process) -> None:
        self._waiting.append((value, process))


class Clock:
    """The time, in seconds, and what happens next. Equal times: in the order in which they were asked for."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.now = 0.0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Have something called then; not before now."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), call))

    def start(self, process: Process) -> None:
        """Let a process go on, now."""
        self.at(self.now, lambda: self._go_on(process))

    def run(self) -> None:
        """Until nothing can happen any more."""
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def _go_on(self, process: Process) -> None:
        for wait in process:
            if isinstance(wait, tuple):
                count, value = wait
                if count.value < value:
                    count.wait(value, process)
                    return
            elif wait > 0:
                self.at(self.now + wait, lambda: self._go_on(process))
                return


class Line:
    """One direction of a host's link: what is handed over leaves in order, at its rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = 0.0
        self.busy_seconds = 0.0

    def reserve(self, begin: float, nbytes: float) -> tuple[float, float]:
        """From when to when the line has so many bytes that are handed over at `begin`."""
        start = max(begin, self._free)
        seconds = nbytes / self._rate
        self.busy_seconds += seconds
        self._free = start + seconds
        return start, self._free


# --- What a cluster of a given size is made of, as far as a prediction rests on it ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a role computes with. A rate may be infinite: that costs nothing."""

    flops_per_second: float = math.inf  # of products
    bytes_per_second: float = math.inf  # of what is read and written element by element
    call_seconds: float = 0.0  # of each operation, however small

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("call_seconds",))

    def model(self) -> MachineModel:
        """As the compiler predicts times."""
        return MachineModel(
            source="rates that were given",
            float32_flops_per_second=self.flops_per_second,
            half_flops_per_second=self.flops_per_second,
            bytes_per_second=self.bytes_per_second,
            stream_bytes_per_second=math.inf,
            operation_seconds=self.call_seconds,
            message_seconds=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one wafer, one shard of MemoryX, one node of SwarmX, and each link: a role has a host to itself."""

    wafer: Compute
    memoryx: Compute
    swarmx_bytes_per_second: float  # that a node adds up, counted as they come in
    link_bytes_per_second: float = math.inf  # of each host, in each direction
    latency_seconds: float = 0.0  # of a frame, from thread to thread
    frame_seconds: float = 0.0  # that a thread spends on each frame that it sends or takes

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("latency_seconds", "frame_seconds"))


def _check_rates(rates: object, seconds: tuple[str, ...]) -> None:
    for field in fields(rates):  # type: ignore[arg-type]
        value = getattr(rates, field.name)
        if isinstance(value, float | int):
            least = value >= 0 if field.name in seconds else value > 0
            if not least or (field.name in seconds and math.isinf(value)):
                raise ValueError(f"{field.name} cannot be {value}")


# ----------------------------------------------------------------------------------------------------------------------
# The SwarmX tree as a simulation sees it: all nodes of a level are alike, and one of them stands for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes of a level. Of those that differ by one child, the fuller one."""

    nodes: int
    children: int  # of each node
    wafers: int  # below each of its children


def tree_levels(num_wafers: int, fan_out: int) -> tuple[Level, ...]:
    """The levels from the root down, as `swarmx_tree` divides them, with at most `fan_out` children of a node."""
    if num_wafers < 1 or fan_out < 2:
        raise ValueError(f"a tree has at least one wafer and two branches, not {num_wafers} and {fan_out}")
    levels: list[Level] = []
    width, wafers = num_wafers, 1
    while not levels or width > 1:
        nodes = -(-width // fan_out)
        children = -(-width // nodes)
        levels.append(Level(nodes=nodes, children=children, wafers=wafers))
        width, wafers = nodes, min(num_wafers, wafers * children)
    return tuple(reversed(levels))


def fan_outs(num_wafers: int) -> Iterator[int]:
    """Those that are worth a try: powers of two, up to one node for all wafers."""
    fan_out = 2
    while fan_out < num_wafers:
        yield fan_out
        fan_out *= 2
    yield max(2, num_wafers)


# --- How long the kernels of a plan take, by the rates of who runs them -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of each kernel, by its number: of the wafers, and of each shard."""

    wafer: Mapping[int, float]
    memoryx: tuple[Mapping[int, float], ...]


def predict_costs(plan: plan_pb2.Plan, rates: Rates) -> Costs:
    """By arithmetic and bytes (`MachineModel`). What MemoryX does in a loop is done in one pass."""
    wafer, memoryx = rates.wafer.model(), rates.memoryx.model()
    known: dict[str, float] = {}  # shards have many kernels in common
    return Costs(
        wafer={kernel.id: operations_time(parse_module(kernel.cirh), wafer) for kernel in plan.wafer.kernels},
        memoryx=tuple(_shard_costs(part.kernels, memoryx, known) for part in plan.memoryx),
    )


def _shard_costs(
    kernels: Iterable[plan_pb2.Kernel], machine: MachineModel, known: dict[str, float]
) -> Mapping[int, float]:
    for kernel in kernels:
        if kernel.cirh not in known:
            known[kernel.cirh] = _update_time(kernel.cirh, machine)
    return {kernel.id: known[kernel.cirh] for kernel in kernels}


def _update_time(text: str, machine: MachineModel) -> float:
    module = parse_module(text)
    try:
        lower(module)
    except NotLowered:
        return operations_time(module, machine)
    return loop_time(module, machine)


# ----------------------------------------------------------------------------------------------------------------------
# What the roles of a simulated cluster share: links, frames on their way, and counts of what has arrived
#
# All wafers do the same at the same time, so one stands for all, and one SwarmX node for each level of the tree: a
# thousand wafers cost no more than a few. Where a node has several children, what it sends to them leaves one behind
# the
# other, and the one that stands for them is the last.


class SimulatedRole:
    """One role with a link and a thread."""

    def __init__(self, name: str, rates: Rates) -> None:
        self.name = name
        self.outgoing = Line(rates.link_bytes_per_second)
        self.incoming = Line(rates.link_bytes_per_second)
        self.busy_seconds = 0.0  # of its thread

    def work(self, seconds: float) -> float:
        """To be yielded: the thread is busy for so long."""
        self.busy_seconds += seconds
        return seconds


class SimulatedCluster:
    """A plan on its roles."""

    def __init__(self, plan: plan_pb2.Plan, costs: Costs, rates: Rates, levels: tuple[Level, ...]) -> None:
        self.plan = plan
        self.costs = costs
        self.rates = rates
        self.levels = levels  # from the root
        self.clock = Clock()
        self.wafer = SimulatedRole("wafer", rates)
        self.shards = [SimulatedRole(f"memoryx-{part.shard}", rates) for part in plan.memoryx]
        self.nodes = [SimulatedRole(f"swarmx level {depth}", rates) for depth in range(len(levels))]
        self._arrived: dict[tuple[str, int], Count] = defaultdict(lambda: Count(self.clock))
        self.credit = [Count(self.clock) for _ in plan.memoryx]  # weights groups that all wafers have taken
        self.step_ends: list[float] = []  # of the wafers

    def arrived(self, host: SimulatedRole, group: int) -> Count:
        """How many frames of a group have come to a host."""
        return self._arrived[host.name, group]

    def carry(
        self,
        sender: SimulatedRole,
        receiver: SimulatedRole,
        nbytes: int,
        arrive: Callable[[], None],
        *,
        copies: int = 1,
        senders: int = 1,
    ) -> None:
        """A frame, now. The receiver is called when its last byte is there.

        copies: to as many receivers of this kind. senders: as many of this kind send theirs to the one receiver.
        """
        start, sent = sender.outgoing.reserve(self.clock.now, copies * nbytes)

        def enter() -> None:
            _, taken = receiver.incoming.reserve(self.clock.now, senders * nbytes)
            self.clock.at(max(sent, taken) + self.rates.latency_seconds, arrive)

        self.clock.at(start, enter)

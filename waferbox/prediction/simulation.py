"""A simulated cluster: discrete events, the rates of its parts, the times of kernels, and links that carry frames."""

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from appliance.compiler.cost.kernel_profile import loop_time, operations_time
from appliance.compiler.cost.machine_model import MachineModel
from waferbox.cirh.text.parser import parse_module
from waferbox.lair.lower import NotLowered, lower
from wsc.v1 import plan_pb2

# --- Discrete events --------------------------------------------------------------------------------------------------

# A process yields seconds that pass, or a count with the value that it waits for.
Wait: TypeAlias = "float | tuple[Count, int]"
Process: TypeAlias = Generator[Wait]


class Count:
    """A number that only grows, with the processes that wait for it to reach a value."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._waiting: list[tuple[int, Process]] = []
        self.value = 0

    def add(self) -> None:
        """Adds one."""
        self.raise_to(self.value + 1)

    def raise_to(self, value: int) -> None:
        """Raises the number to a value, and starts the processes that waited for it; nothing if it is larger."""
        if value <= self.value:
            return
        self.value = value
        if not self._waiting:
            return
        ready = [process for awaited, process in self._waiting if awaited <= value]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > value]
        for process in ready:
            self._clock.start(process)

    def wait(self, value: int, process: Process) -> None:
        """Starts the process when the number reaches `value`, which it has not yet."""
        self._waiting.append((value, process))


class Clock:
    """The time of a simulation, in seconds, with the queue of its events. Equal times run in order of scheduling."""

    def __init__(self) -> None:
        # Events of the present come after those that were scheduled for it before, so they need no order of their own.
        self._present: deque[Callable[[], None] | Process] = deque()
        self._future: list[tuple[float, int, Callable[[], None] | Process]] = []
        self._numbers = itertools.count()
        self.now = 0.0

    def at(self, time: float, event: Callable[[], None] | Process) -> None:
        """Schedules a call, or a process to start or continue, at a time; one in the past is made now."""
        if time <= self.now:
            self._present.append(event)
        else:
            heapq.heappush(self._future, (time, next(self._numbers), event))

    def start(self, process: Process) -> None:
        """Starts or continues a process, now."""
        self._present.append(process)

    def run(self) -> None:
        """Runs events until none is left. Processes that still wait then wait for ever."""
        present, future, pop = self._present, self._future, heapq.heappop
        while present or future:
            if future and (not present or future[0][0] <= self.now):
                self.now, _, event = pop(future)
            else:
                event = present.popleft()
            if callable(event):
                event()
            else:
                self._advance(event)

    def _advance(self, process: Process) -> None:
        """Runs a process until it has to wait."""
        for wait in process:
            if isinstance(wait, tuple):
                count, value = wait
                if count.value < value:
                    count.wait(value, process)
                    return
            elif wait > 0:
                self.at(self.now + wait, process)
                return


class Line:
    """One direction of a host's link, which carries frames one after the other at a fixed rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = 0.0
        self.busy_seconds = 0.0

    def reserve(self, begin: float, nbytes: float) -> tuple[float, float]:
        """Reserves the line for a frame that is handed over at `begin`. Returns the begin and end of its transfer."""
        start = max(begin, self._free)
        seconds = nbytes / self._rate
        self.busy_seconds += seconds
        self._free = start + seconds
        return start, self._free


# --- Rates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The speed of a role's processor. Work with an infinite rate takes no time.

    Attributes:
        flops_per_second: rate of products.
        bytes_per_second: rate of element-wise work, in bytes read and written.
        call_seconds: time of each operation, in addition to its work.
    """

    flops_per_second: float = math.inf
    bytes_per_second: float = math.inf
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("call_seconds",))

    def model(self) -> MachineModel:
        """The machine model with which the compiler predicts times."""
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
    """The rates of a cluster's parts, each of which has a host to itself.

    Attributes:
        wafer: the processor of a wafer.
        memoryx: the processor of a MemoryX shard.
        swarmx_bytes_per_second: received bytes that a SwarmX node adds up per second.
        link_bytes_per_second: rate of each host's link, in each direction.
        latency_seconds: latency of a frame, from thread to thread.
        frame_seconds: time that a thread spends on each frame that it sends or receives.
    """

    wafer: Compute
    memoryx: Compute
    swarmx_bytes_per_second: float
    link_bytes_per_second: float = math.inf
    latency_seconds: float = 0.0
    frame_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("latency_seconds", "frame_seconds"))


def _check_rates(rates: object, seconds: tuple[str, ...]) -> None:
    for field in fields(rates):  # type: ignore[arg-type]
        value = getattr(rates, field.name)
        if isinstance(value, float | int):
            least = value >= 0 if field.name in seconds else value > 0
            if not least or (field.name in seconds and math.isinf(value)):
                raise ValueError(f"{field.name} cannot be {value}")


# --- The levels of the SwarmX tree ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes of a level of the SwarmX tree. They differ by at most one child; the fullest represents them.

    Attributes:
        nodes: number of nodes.
        children: number of children of a node.
        wafers: number of wafers below each child.
    """

    nodes: int
    children: int
    wafers: int


def tree_levels(num_wafers: int, fan_out: int) -> tuple[Level, ...]:
    """The levels of a tree from the root down, divided as in `waferbox/runtime/swarmx_trees.py`; none for one wafer.

    Raises:
        ValueError: `num_wafers` is less than 1, or `fan_out` less than 2 for several wafers.
    """
    if num_wafers < 1 or fan_out < min(2, num_wafers):
        raise ValueError(f"a tree has at least one wafer and two branches, not {num_wafers} and {fan_out}")
    levels: list[Level] = []
    width, wafers = num_wafers, 1
    while width > 1:
        nodes = -(-width // fan_out)
        children = -(-width // nodes)
        levels.append(Level(nodes=nodes, children=children, wafers=wafers))
        width, wafers = nodes, min(num_wafers, wafers * children)
    return tuple(reversed(levels))


def fan_outs(num_wafers: int) -> Iterator[int]:
    """The fan-outs that are worth a try: powers of two, up to one node for all wafers. A single wafer has no node."""
    fan_out = 2
    while fan_out < num_wafers:
        yield fan_out
        fan_out *= 2
    yield num_wafers


# --- The times of kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of each kernel, by its number.

    Attributes:
        wafer: the kernels of a wafer.
        memoryx: the kernels of each MemoryX shard.
    """

    wafer: Mapping[int, float]
    memoryx: tuple[Mapping[int, float], ...]


def predict_costs(plan: plan_pb2.Plan, rates: Rates) -> Costs:
    """Predicts the times of a plan's kernels from their arithmetic and bytes (`MachineModel`)."""
    wafer, memoryx = rates.wafer.model(), rates.memoryx.model()
    known: dict[str, float] = {}  # by text of the kernel: shards have many kernels in common
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
    """The time of a kernel of MemoryX: of one pass over its data if it is lowered to a loop."""
    module = parse_module(text)
    try:
        lower(module)
    except NotLowered:
        return operations_time(module, machine)
    return loop_time(module, machine)


# --- The cluster ------------------------------------------------------------------------------------------------------
#
# All wafers do the same at the same time, so one represents them all, and one SwarmX node represents each level of a
# tree: a thousand wafers cost no more than a few. What a node sends to its children leaves one after the other; the
# child that represents them is the last.


class SimulatedRole:
    """A role with a link and one thread."""

    def __init__(self, name: str, rates: Rates) -> None:
        self.name = name
        self.outgoing = Line(rates.link_bytes_per_second)
        self.incoming = Line(rates.link_bytes_per_second)
        self.busy_seconds = 0.0  # of the thread

    def work(self, seconds: float) -> float:
        """Counts the seconds as busy, and returns them for the process to yield."""
        self.busy_seconds += seconds
        return seconds


class SimulatedCluster:
    """The roles of a plan, with the clock and the counts that they share."""

    def __init__(
        self, plan: plan_pb2.Plan, costs: Costs, rates: Rates, levels: tuple[Level, ...], num_trees: int = 1
    ) -> None:
        """
        Args:
            plan: of the step.
            costs: of its kernels.
            rates: of the cluster's parts.
            levels: of each SwarmX tree, from the root; none for a single wafer.
            num_trees: number of SwarmX trees, each with nodes of its own; the shards are divided among them.
        """
        self.plan = plan
        self.costs = costs
        self.rates = rates
        self.levels = levels
        self.clock = Clock()
        self.wafer = SimulatedRole("wafer", rates)
        self.shards = [SimulatedRole(f"memoryx-{part.shard}", rates) for part in plan.memoryx]
        self.nodes = [
            [SimulatedRole(f"swarmx tree {tree} level {depth}", rates) for depth in range(len(levels))]
            for tree in range(num_trees)
        ]  # by tree and level
        self._arrived: dict[tuple[str, int], Count] = defaultdict(lambda: Count(self.clock))
        self.credit = [Count(self.clock) for _ in plan.memoryx]  # weights groups that all wafers have taken
        self.step_ends: list[float] = []  # when the wafers ended each step

    def arrived(self, host: SimulatedRole, group: int) -> Count:
        """The count of frames of a group that have arrived at a host."""
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
        """Sends a frame now.

        Args:
            sender: the role that sends.
            receiver: the role that receives.
            nbytes: size of the frame.
            arrive: called when the last byte has arrived.
            copies: number of receivers of this kind that each get a copy.
            senders: number of senders of this kind that each send a frame to the receiver.
        """
        start, sent = sender.outgoing.reserve(self.clock.now, copies * nbytes)

        def enter() -> None:
            _, taken = receiver.incoming.reserve(self.clock.now, senders * nbytes)
            self.clock.at(max(sent, taken) + self.rates.latency_seconds, arrive)

        self.clock.at(start, enter)

"""Predicts the timeline of a step: simulates the roles' programs with the times of the machine model.

Each role has one thread and runs its program in order. A message leaves when its sender's line is free, and its
receiver waits for it. All wafers do the same, so one is simulated. The result does not depend on the order in which the
roles are advanced.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from waferbox.runtime.loops import body_of, in_order
from waferbox.runtime.schedule import WEIGHTS_CREDIT_BATCH, WEIGHTS_WINDOW
from wsc.v1 import plan_pb2

WAFER: Final = "wafer"
WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
# So many repetitions of a loop are simulated. The others take as long as those behind the first few.
_MOST_REPETITIONS: Final = 12
_FIRST_REPETITIONS: Final = 3

WaferSeconds = Callable[[plan_pb2.Run], float]
MemoryXSeconds = Callable[[int, plan_pb2.Run], float]  # by shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work or a message in a step.

    Attributes:
        track: "wafer" (segments), "weights" (messages to the wafer), "gradients" (messages of all reductions),
            "memoryx-0" and so on (kernels); of a pipelined wafer: "region-0" and so on.
        label: the segment, or the states.
        begin: its begin, in seconds since the begin of the step.
        end: its end.
        nbytes: size of a message; 0 for work.
        micro_batch: micro-batch of work in a region.
    """

    track: str
    label: str
    begin: float
    end: float
    nbytes: int = 0
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step, from the first to the last work of any role.

    Attributes:
        step_seconds: its time.
        wafer_busy_seconds: the time in which a wafer computes.
        spans: its work and messages, without those that are left out.
        left_out_rounds: the rounds that are left out, as they are like those before them.
        left_out_seconds: their time.
    """

    step_seconds: float
    wafer_busy_seconds: float
    spans: tuple[Span, ...]
    left_out_rounds: int = 0
    left_out_seconds: float = 0.0

    @property
    def drawn_seconds(self) -> float:
        """The time of the spans, in which those after the rounds that are left out follow those before them."""
        return self.step_seconds - self.left_out_seconds


class ScheduleStuck(ValueError):
    """Raised if the roles of a plan wait for one another."""


def simulate(
    plan: plan_pb2.Plan, machine: MachineModel, wafer_time: WaferSeconds, memoryx_time: MemoryXSeconds
) -> Timeline:
    """Simulates one step, of a long loop some repetitions.

    Args:
        plan: a plan for weight streaming.
        machine: the rates of messages.
        wafer_time: predicted seconds of a Run of the wafer.
        memoryx_time: predicted seconds of a Run of a shard.

    Raises:
        ScheduleStuck: a role waits for a message that is never sent.
    """
    times = min(plan.wafer.loop.times, _MOST_REPETITIONS)
    left_out = plan.wafer.loop.times - times
    board = _Board(plan, machine)
    shards = [_shard(board, part, _shortened(part.loop, times), memoryx_time) for part in plan.memoryx]
    ends: list[float] = []
    wafer = _wafer(board, plan.wafer, _shortened(plan.wafer.loop, times), wafer_time, ends)
    threads: list[Iterator[None]] = [wafer, *shards]
    # Each round advances every role until it waits. A round in which none has moved is a deadlock.
    while threads:
        moves = board.moves
        for thread in list(threads):
            try:
                next(thread)
            except StopIteration:
                threads.remove(thread)
                board.moves += 1
        if board.moves == moves:
            raise ScheduleStuck("the programs of the roles wait for one another")
    spans = sorted(board.spans, key=lambda span: (span.track, span.begin))
    busy = sum(span.end - span.begin for span in spans if span.track == WAFER)
    left_out_seconds = 0.0
    if left_out:
        left_out_seconds = left_out * (ends[-1] - ends[_FIRST_REPETITIONS - 1]) / (len(ends) - _FIRST_REPETITIONS)
        body = body_of(plan.wafer.loop)
        runs = (i.run for i in plan.wafer.instructions[body.start : body.stop] if i.HasField("run"))
        busy += left_out * sum(map(wafer_time, runs))
    return Timeline(
        step_seconds=max((span.end for span in spans), default=0.0) + left_out_seconds,
        wafer_busy_seconds=busy,
        spans=tuple(spans),
        left_out_rounds=left_out,
        left_out_seconds=left_out_seconds,
    )


class _Board:
    """The shared state of the roles: when messages arrive, until when lines are busy, and the spans so far."""

    def __init__(self, plan: plan_pb2.Plan, machine: MachineModel) -> None:
        self._num_csx = plan.num_csx
        self._machine = machine
        self._line_free: dict[str, float] = defaultdict(float)
        self.arrivals: dict[tuple[str, int], list[float]] = defaultdict(list)  # (receiver, group), in order
        self.taken: dict[int, list[float]] = defaultdict(list)  # by shard: when the wafer took each weights group
        self.spans: list[Span] = []
        self.moves = 0

    def note(self, track: str, label: str, begin: float, end: float, nbytes: int = 0) -> None:
        self.spans.append(Span(track=track, label=label, begin=begin, end=end, nbytes=nbytes))
        self.moves += 1

    def carry(self, line: str, begin: float, nbytes: int) -> tuple[float, float]:
        """The times at which a message that is handed over at `begin` leaves and arrives."""
        start = max(begin, self._line_free[line])
        end = start + self._machine.message_time(nbytes)
        self._line_free[line] = end
        return start, end

    def reduce(self, group: plan_pb2.Group, begin: float, label: str) -> None:
        """Sends a group from all wafers; SwarmX adds the parts, if there are several wafers, and sends the sum on."""
        start, end = self.carry("up", begin, group.nbytes)
        if self._num_csx > 1:
            end += (self._num_csx - 1) * self._machine.message_time(group.nbytes)
        self.note(GRADIENTS, label, start, end, group.nbytes)
        receivers = [f"memoryx-{shard}" for shard in group.shards]
        for receiver in [*receivers, *([WAFER] if group.to_wafers else [])]:
            self.arrivals[receiver, group.id].append(end)


def _shortened(loop: plan_pb2.Loop, times: int) -> plan_pb2.Loop:
    return plan_pb2.Loop(begin=loop.begin, end=loop.end, times=min(loop.times, times))


def _wafer(
    board: _Board, plan: plan_pb2.WaferPlan, loop: plan_pb2.Loop, seconds: WaferSeconds, ends: list[float]
) -> Iterator[None]:
    """Runs the wafer's program. ends: gets the time at which each repetition of the loop ends."""
    groups = {group.id: group for group in plan.groups}
    received: dict[int, int] = defaultdict(int)
    now = 0.0
    layer = ""
    for instruction, repetition in in_order(plan.instructions, loop):
        if repetition > len(ends):
            ends.append(now)
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                if group.kind == plan_pb2.GROUP_KIND_BATCH:
                    continue  # available at once, as workers run ahead
                arrivals = board.arrivals[WAFER, group.id]
                while len(arrivals) <= received[group.id]:
                    yield
                now = max(now, arrivals[received[group.id]])
                received[group.id] += 1
                board.moves += 1
                if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                    board.taken[group.source_shard].append(now)
            case "run":
                begin, now, layer = now, now + seconds(instruction.run), instruction.run.layer
                board.note(WAFER, layer, begin, now)
            case "send":
                board.reduce(groups[instruction.send.group], now, layer)


def _shard(board: _Board, plan: plan_pb2.MemoryXPlan, loop: plan_pb2.Loop, seconds: MemoryXSeconds) -> Iterator[None]:
    name = f"memoryx-{plan.shard}"
    groups = {group.id: group for group in plan.groups}
    names = {slot.value: slot.name for slot in plan.states}
    received: dict[int, int] = defaultdict(int)
    sent = 0
    now = 0.0
    for instruction, _ in in_order(plan.instructions, loop):
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                arrivals = board.arrivals[name, group.id]
                while len(arrivals) <= received[group.id]:
                    yield
                now = max(now, arrivals[received[group.id]])
                received[group.id] += 1
                board.moves += 1
            case "run":
                begin, now = now, now + seconds(plan.shard, instruction.run)
                board.note(name, _update_label(instruction.run, names), begin, now)
            case "send":
                group = groups[instruction.send.group]
                if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                    # The wafer sends its credit for several groups at once.
                    needed = sent - WEIGHTS_WINDOW + 1
                    needed = -(-needed // WEIGHTS_CREDIT_BATCH) * WEIGHTS_CREDIT_BATCH
                    taken = board.taken[plan.shard]
                    while len(taken) < needed:
                        yield
                    now = max(now, taken[needed - 1]) if needed > 0 else now
                    sent += 1
                    start, end = board.carry(f"{name} down", now, group.nbytes)
                    board.arrivals[WAFER, group.id].append(end)
                    board.note(WEIGHTS, _members_label(group, names), start, end, group.nbytes)
                elif group.kind == plan_pb2.GROUP_KIND_EXCHANGE:
                    _, end = board.carry(f"{name} across", now, group.nbytes)
                    for shard in group.shards:
                        board.arrivals[f"memoryx-{shard}", group.id].append(end)
                    board.moves += 1


def _update_label(run: plan_pb2.Run, names: Mapping[int, str]) -> str:
    """The label of a Run of MemoryX: the states that it replaces."""
    return _listed([names[state] for state in run.commits if state in names]) or "numbers"


def _members_label(group: plan_pb2.Group, names: Mapping[int, str]) -> str:
    """The label of a group: the states that it carries."""
    return _listed([names[member.value] for member in group.members if member.value in names]) or "computed values"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else ""

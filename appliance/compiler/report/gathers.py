"""What gathering costs: by line of the script the bytes, and the share of the predicted time of a step."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.report.timeline import MemoryXSeconds, Timeline, WaferSeconds, simulate
from appliance.drawing.number_text import bytes_text
from waferbox.links.elements import tensor_bytes
from wsc.v1 import plan_pb2

# A warning names at most so many lines; the report has all.
_MOST_LINES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherReport:
    """A line of the script for which values of the batch are gathered.

    Attributes:
        source: the line, with its module.
        reason: why no sharding rule holds there.
        nbytes: bytes that a wafer sends and receives for it in a step.
    """

    source: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """All that is gathered in a step.

    Attributes:
        lines: the lines for which it is gathered, the most bytes first.
        time_share: the share of the predicted time of a step that it takes, from 0 to 1.
    """

    lines: tuple[GatherReport, ...] = ()
    time_share: float = 0.0

    @property
    def share_text(self) -> str:
        """The share of the time as text."""
        return f"{self.time_share:.0%}" if self.time_share >= 0.01 else "less than 1%"

    def warning(self) -> str:
        """A line for the user; empty if nothing is gathered."""
        if not self.lines:
            return ""
        lines = ", ".join(
            f"{line.source}: {line.reason} ({bytes_text(line.nbytes)} a step)" for line in self.lines[:_MOST_LINES]
        )
        if len(self.lines) > _MOST_LINES:
            lines += f"; and {len(self.lines) - _MOST_LINES} more lines (see the compile report)"
        return (
            f"Rows of the whole batch are gathered, as samples are mixed: {lines}. This takes {self.share_text} of the "
            "predicted time of a step, more with more wafers. To make it an error, set "
            "cstorch.backends.csx.performance.strict_sharding = True"
        )


def gathering_of(
    plan: plan_pb2.Plan,
    machine: MachineModel,
    timeline: Timeline,
    wafer_time: WaferSeconds,
    memoryx_time: MemoryXSeconds,
) -> Gathering:
    """The cost of gathering in a plan for weight streaming.

    Args:
        plan: the plan.
        machine: the rates of messages.
        timeline: the predicted step.
        wafer_time: predicted seconds of a Run of the wafer.
        memoryx_time: predicted seconds of a Run of a shard.
    """
    if not plan.gathered:
        return Gathering()
    sources = {gathered.value: (gathered.source, gathered.reason) for gathered in plan.gathered}
    # What MemoryX computes from gathered values is computed whole, and streamed to the wafers like a weight.
    streamed = {
        value: sources[first]
        for run in _memoryx_runs(plan)
        if (first := next((value for value in run.inputs if value in sources), None)) is not None
        for value in run.outputs
    }
    nbytes: Counter[tuple[str, str]] = Counter()
    without = plan_pb2.Plan()
    without.CopyFrom(plan)
    for group in without.wafer.groups:
        of_group = sources if group.kind == plan_pb2.GROUP_KIND_REDUCTION else streamed
        for member in group.members:
            if member.value in of_group:
                there_and_back = 2 if group.to_wafers else 1
                nbytes[of_group[member.value]] += there_and_back * tensor_bytes(member.type)
    for groups in (without.wafer.groups, *(shard.groups for shard in without.memoryx)):
        for group in groups:
            group.nbytes -= sum(tensor_bytes(m.type) for m in group.members if m.value in sources | streamed)
    free = simulate(
        without,
        machine,
        wafer_time,
        lambda shard, run: 0.0 if sources.keys() & set(run.inputs) else memoryx_time(shard, run),
    )
    share = 1 - free.step_seconds / timeline.step_seconds if timeline.step_seconds else 0.0
    lines = (
        GatherReport(source=source, reason=reason, nbytes=count) for (source, reason), count in nbytes.most_common()
    )
    return Gathering(lines=tuple(lines), time_share=max(share, 0.0))


def _memoryx_runs(plan: plan_pb2.Plan) -> Iterator[plan_pb2.Run]:
    return (i.run for shard in plan.memoryx for i in shard.instructions if i.WhichOneof("kind") == "run")

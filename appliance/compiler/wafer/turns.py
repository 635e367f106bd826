"""In which order a wafer goes through its segments and its micro-batches.

A turn is a segment with some micro-batches, one after the other. Layer by layer each segment has one turn, with all of
them: its weights are streamed once, and the activations of all micro-batches are kept. With fewer micro-batches at once
the wafer goes through the step several times: activations are those of few micro-batches, and weights are streamed each
time. What leads to values that the wafers wait for (a batch's statistics, the number of its labels) is made of the
whole batch: those segments come first, layer by layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.layers import Segment
from appliance.compiler.partition.waits import Waits


@dataclass(slots=True, eq=False)
class Work:
    """A turn of a segment, with all that its kernel reads and makes for others."""

    segment: Segment
    ops: list[Operation]
    inputs: list[SSAValue]
    outputs: list[SSAValue] = field(default_factory=list)
    micro_batches: range = range(1)
    is_last: bool = True  # of its segment: all micro-batches have been computed


def order_turns(segments: Sequence[Work], whole: int, micro_batches: int, at_once: int) -> list[Work]:
    """All turns in order. whole: how many segments come first, for the whole batch. at_once divides micro_batches."""
    turns = _turns(segments[:whole], range(micro_batches), is_last=True)
    for begin in range(0, micro_batches, at_once):
        now = range(begin, begin + at_once)
        turns += _turns(segments[whole:], now, is_last=now.stop == micro_batches)
    return turns


def _turns(segments: Iterable[Work], micro_batches: range, *, is_last: bool) -> list[Work]:
    return [replace(work, micro_batches=micro_batches, is_last=is_last) for work in segments]


def num_of_whole_batch(segments: Sequence[Work], waits: Waits) -> int:
    """How many segments, from the first, must have been run for the whole batch before others can be."""
    home = {value: position for position, work in enumerate(segments) for value in work.outputs}
    waited = {value for work in segments for op in work.segment.ops for value in waits.returned(op)}
    return max((home[value] + 1 for value in waited), default=0)

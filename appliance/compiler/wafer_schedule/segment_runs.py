"""In which order a wafer goes through its segments and its micro-batches.

A segment run is a segment with some micro-batches, one after the other. Layer by layer each segment has one
segment_run, with all of them: its weights are streamed once, and the activations of all micro-batches are kept. With
fewer micro-batches at once the wafer goes through the step several times: activations are those of few micro-batches,
and weights are streamed each time. What leads to values that the wafers wait for (a batch's statistics, the number of
its labels) is made of the whole batch: those segments come first, layer by layer. Gradients that travel in half are
rounded when all micro-batches have added their parts: by a segment run of its own behind the segment's last, which
reads nothing but the sums.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.layers import Segment, Waits, inputs_of
from wsc.v1 import plan_pb2


@dataclass(slots=True, eq=False)
class SegmentRun:
    """A segment run of a segment, with all that its kernel reads and makes for others."""

    segment: Segment
    ops: list[Operation]
    inputs: list[SSAValue]
    outputs: list[SSAValue] = field(default_factory=list)
    micro_batches: range = range(1)
    is_last: bool = True  # of its segment: all micro-batches have been computed


def order_segment_runs(
    segments: Sequence[SegmentRun], whole: int, micro_batches: int, at_once: int, closing: Mapping[Segment, SegmentRun]
) -> list[SegmentRun]:
    """All turns in order.

    Args:
        whole: how many segments come first, for the whole batch.
        at_once: divides micro_batches.
        closing: what follows the last segment run of a segment, once.
    """
    turns = _segment_runs(segments[:whole], range(micro_batches), is_last=True)
    for begin in range(0, micro_batches, at_once):
        now = range(begin, begin + at_once)
        turns += _segment_runs(segments[whole:], now, is_last=now.stop == micro_batches)
    ordered = []
    for segment_run in turns:
        ordered.append(segment_run)
        if segment_run.is_last and segment_run.segment in closing:
            ordered.append(closing[segment_run.segment])
    return ordered


def take_out_rounding(segments: list[SegmentRun], rounding: Collection[Operation]) -> dict[Segment, SegmentRun]:
    """Leaves operations out of the segments. Returns the turns that do them, by the segments that make what is read."""
    makers: dict[SSAValue, SegmentRun] = {
        result: work for work in segments for op in work.segment.ops for result in op.results
    }
    closing: dict[Segment, SegmentRun] = {}
    for work in list(segments):
        for op in [op for op in work.segment.ops if op in rounding]:
            (value,), (half,) = op.operands, op.results
            maker = makers[value]
            segment = Segment(maker.segment.layer, maker.segment.backward)
            segment_run = closing.setdefault(maker.segment, SegmentRun(segment, [], []))
            segment_run.ops.append(op)
            segment_run.inputs.append(value)
            segment_run.outputs.append(half)
            maker.outputs = [*(other for other in maker.outputs if other is not value), value]
            work.segment.ops.remove(op)
            work.ops.remove(op)
            work.outputs.remove(half)
            work.inputs = inputs_of(work.ops)
        if not work.ops:
            segments.remove(work)
    return closing


def is_rounding(run: plan_pb2.Run, sums: Collection[int]) -> bool:
    """Whether it is a Run of such a segment_run. sums: the values to which micro-batches add parts before they are
    rounded.
    """
    return bool(run.inputs) and all(value in sums for value in run.inputs)


def _segment_runs(segments: Iterable[SegmentRun], micro_batches: range, *, is_last: bool) -> list[SegmentRun]:
    return [replace(work, micro_batches=micro_batches, is_last=is_last) for work in segments]


def num_of_whole_batch(segments: Sequence[SegmentRun], waits: Waits, closing: Mapping[Segment, SegmentRun]) -> int:
    """How many segments, from the first, must have been run for the whole batch before others can be."""
    home = {value: position for position, work in enumerate(segments) for value in work.outputs}
    for position, work in enumerate(segments):
        if work.segment in closing:
            home.update(dict.fromkeys(closing[work.segment].outputs, position))
    waited = {value for work in segments for op in work.segment.ops for value in waits.returned(op)}
    return max((home[value] + 1 for value in waited), default=0)

"""The order in which a wafer goes through its segments and its micro-batches.

A segment run is a segment with some of its micro-batches, one after the other. With all micro-batches at once, each
segment has one run: its weights are streamed once, and the activations of all micro-batches are kept. With fewer at
once, the wafer goes through the step in rounds: it keeps the activations of few micro-batches, and streams the weights
in each round. Gradients are added on the wafer, and leave it in the last round; or they leave it in each round, so that
it needs no memory for them in between, and MemoryX adds them. Segments on which values of the whole batch depend, such
as a batch's statistics or the number of its labels, come first, with all micro-batches. Gradients that travel in half
precision are rounded when all micro-batches have added their parts: by a segment run after the segment's last, which
reads only the sums.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.layers import Segment, Waits, inputs_of
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """The order in which a wafer goes through its segments and its micro-batches.

    Attributes:
        micro_batches: number of micro-batches.
        at_once: number of micro-batches of a round, which go through the layers together; divides `micro_batches`.
        adds_in_memoryx: whether gradients leave the wafer in each round, and are added in MemoryX.
        kept_every: of so many layers in a row, the outputs of one are kept for the backward pass, before which the
            forward passes of the others are run again. Each further number divides those in the same way. None: the
            outputs of all are kept.
        kept_at_most: how many outputs of layers are kept at most, beside what the running layer reads. It replaces
            `kept_every`. None: as that says.
        keeps_weights: whether weights that are read again after a few segments stay on the wafer until then.
        longest_stay: weights stay on the wafer between two reads, too, if at most so many runs lie between them.
    """

    micro_batches: int
    at_once: int
    adds_in_memoryx: bool = False
    kept_every: tuple[int, ...] = ()
    kept_at_most: int | None = None
    keeps_weights: bool = True
    longest_stay: int = 0

    @property
    def rounds(self) -> list[range]:
        """The micro-batches of each round."""
        return [range(begin, begin + self.at_once) for begin in range(0, self.micro_batches, self.at_once)]

    @property
    def listed_rounds(self) -> list[range]:
        """The rounds that a plan lists: the first, the second, which stands for all behind it, and the last."""
        rounds = self.rounds
        return rounds if len(rounds) <= 3 else [*rounds[:2], rounds[-1]]


@dataclass(slots=True, eq=False)
class SegmentRun:
    """A segment with some of its micro-batches: one entry of a wafer's schedule.

    Attributes:
        segment: the segment.
        ops: operations of its kernel, including small ones that are computed again where they are read.
        inputs: values that the kernel reads.
        outputs: values that the kernel makes for others.
        micro_batches: numbers of the micro-batches.
        round: number of the round, among those that are listed; 0 if all micro-batches are run at once.
        is_last: whether all micro-batches of the segment have been computed after this run.
    """

    segment: Segment
    ops: list[Operation]
    inputs: list[SSAValue]
    outputs: list[SSAValue] = field(default_factory=list)
    micro_batches: range = range(1)
    round: int = 0
    is_last: bool = True


def order_segment_runs(
    segments: Sequence[SegmentRun],
    whole: int,
    micro_batches: int,
    rounds: Sequence[range],
    closing: Mapping[Segment, SegmentRun],
    again: Mapping[int, Sequence[SegmentRun]],
) -> list[SegmentRun]:
    """Orders the segment runs of a step.

    Args:
        segments: one run for each segment, in order.
        whole: number of segments that come first, with all micro-batches.
        micro_batches: number of micro-batches.
        rounds: the micro-batches of each run of the other segments, by round.
        closing: by segment, a run that follows its last run.
        again: by the place of a segment, the runs that run earlier segments again before it.
    """
    runs = _segment_runs(segments[:whole], range(micro_batches), is_last=True)
    for number, now in enumerate(rounds):
        for place in range(whole, len(segments)):
            runs += _segment_runs(again.get(place, ()), now, number, is_last=False)
            runs += _segment_runs([segments[place]], now, number, is_last=now.stop == micro_batches)
    ordered = []
    for run in runs:
        ordered.append(run)
        if run.is_last and run.segment in closing:
            ordered.append(closing[run.segment])
    return ordered


def take_out_rounding(segments: list[SegmentRun], rounding: Collection[Operation]) -> dict[Segment, SegmentRun]:
    """Takes roundings of sums out of the segments.

    Returns:
        Segment runs that do the roundings, by the segments that make the sums.
    """
    makers: dict[SSAValue, SegmentRun] = {
        result: run for run in segments for op in run.segment.ops for result in op.results
    }
    closing: dict[Segment, SegmentRun] = {}
    for run in list(segments):
        for op in [op for op in run.segment.ops if op in rounding]:
            (value,), (half,) = op.operands, op.results
            maker = makers[value]
            segment = Segment(maker.segment.layer, maker.segment.backward)
            segment_run = closing.setdefault(maker.segment, SegmentRun(segment, [], []))
            segment_run.ops.append(op)
            segment_run.inputs.append(value)
            segment_run.outputs.append(half)
            maker.outputs = [*(other for other in maker.outputs if other is not value), value]
            run.segment.ops.remove(op)
            run.ops.remove(op)
            run.outputs.remove(half)
            run.inputs = inputs_of(run.ops)
        if not run.ops:
            segments.remove(run)
    return closing


def is_rounding(run: plan_pb2.Run, sums: Collection[int]) -> bool:
    """Whether a Run only rounds sums. sums: the values to which micro-batches add parts."""
    return bool(run.inputs) and all(value in sums for value in run.inputs)


def _segment_runs(
    segments: Iterable[SegmentRun], micro_batches: range, number: int = 0, *, is_last: bool
) -> list[SegmentRun]:
    return [replace(run, micro_batches=micro_batches, round=number, is_last=is_last) for run in segments]


def runs_again(
    segments: Sequence[SegmentRun], repeatable: Mapping[int, SegmentRun], order: StepOrder
) -> dict[int, list[SegmentRun]]:
    """By the place of a segment, the runs that run earlier segments again before it, in order.

    Args:
        segments: one run for each segment, in order.
        repeatable: by the place of a segment of the forward pass that may be run again, the run that does.
        order: says which of them are run again.
    """
    again: dict[int, list[SegmentRun]] = {}
    rows = _consecutive(repeatable)
    if order.kept_at_most is not None:
        repeated_rows = [part for row in rows for part in _rows_keeping_at_most(row, order.kept_at_most)]
    else:
        repeated_rows = _rows_keeping_every(rows, order.kept_every)
    for row in repeated_rows:
        repeated = [repeatable[place] for place in row[:-1]]
        reader = _first_reader(segments, row[-1], repeated)
        if reader is not None:
            again.setdefault(reader, []).extend(repeated)
    return again


def _rows_keeping_every(rows: Iterable[Sequence[int]], kept_every: Sequence[int]) -> list[Sequence[int]]:
    """The rows of which all but the last are run again, outer ones first.

    kept_every: how many are in a row; further numbers are of those in such a row.
    """
    found: list[Sequence[int]] = []
    # Outputs of the last row within another are there when it is run backwards, since the whole of that one was run.
    outer = [(row, True) for row in rows]
    for most in kept_every:
        inner = []
        for row, is_new in outer:
            parts = [row[begin : begin + most] for begin in range(0, len(row), most)]
            inner += [(part, is_new or part is not parts[-1]) for part in parts]
        found += [row for row, is_new in inner if is_new]
        outer = [(row, False) for row, _ in inner]
    return found


def _rows_keeping_at_most(row: Sequence[int], kept: int) -> Iterator[Sequence[int]]:
    """Yields the rows of which all but the last are run again, outer ones first, for a row that was just run.

    The output in front of the second part of a row is kept until that part was run backwards; then the first part is
    run again. The parts are as long as binomial checkpointing has them, so that no layer is run more often than needed.
    """
    while len(row) > _most_in_row(kept, 0):
        times = 1
        while _most_in_row(kept, times) < len(row):
            times += 1
        # With nothing kept, the first part is run again for the last of the row alone.
        behind = _most_in_row(kept - 1, times) if kept else 1
        middle = len(row) - min(behind, len(row) - 1)
        yield from _rows_keeping_at_most(row[middle:], kept - 1) if kept else ()
        row = row[:middle]
        yield row


@cache
def _most_in_row(kept: int, times: int) -> int:
    """The most layers that can be run backwards with so many kept outputs, if each is run again so many times."""
    if not times:
        return kept + 2
    return _most_in_row(kept, times - 1) + (_most_in_row(kept - 1, times) if kept else 1)


def _consecutive(places: Iterable[int]) -> list[list[int]]:
    """The places, those in a row together."""
    rows: list[list[int]] = []
    for place in places:
        if rows and rows[-1][-1] + 1 == place:
            rows[-1].append(place)
        else:
            rows.append([place])
    return rows


def _first_reader(segments: Sequence[SegmentRun], last: int, repeated: Iterable[SegmentRun]) -> int | None:
    """The first segment of the backward pass behind a place that reads what runs make."""
    made = {value for run in repeated for value in run.outputs}
    for place in range(last + 1, len(segments)):
        if segments[place].segment.backward and not made.isdisjoint(segments[place].inputs):
            return place
    return None


def num_of_whole_batch(segments: Sequence[SegmentRun], waits: Waits, closing: Mapping[Segment, SegmentRun]) -> int:
    """The number of segments, from the first, that must have been run for the whole batch before any other is run."""
    home = {value: position for position, run in enumerate(segments) for value in run.outputs}
    for position, run in enumerate(segments):
        if run.segment in closing:
            home.update(dict.fromkeys(closing[run.segment].outputs, position))
    waited = {value for run in segments for op in run.segment.ops for value in waits.awaited(op)}
    return max((home[value] + 1 for value in waited), default=0)

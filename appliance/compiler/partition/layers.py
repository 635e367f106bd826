"""Layers: the wafer's work cut into segments by the module that each operation comes from.

A layer is a module path up to its first list index (h.3.attention -> h.3). A segment is what a layer does in one go:
its part of the forward pass, or of the backward pass. Segments are runs in the order of the trace, which is always a
valid order; a run is joined to an earlier one of the same layer if nothing that it needs was made in between.
"""

from dataclasses import dataclass, field

from xdsl.ir import Block, Operation, SSAValue, Use

from appliance.compiler.core.layer_names import layer_of
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.waits import Waits, closure, inputs_of
from cirh.dialect.locations import source_of
from cirh.dialect.operations import Const
from cirh.table.lookup import spec

# The layer of what is made of the batch alone, and of keys of random numbers: before all others.
INPUT = "input"
# The end of the label of a segment of the backward pass.
BACKWARD = " backward"


@dataclass(slots=True, eq=False)
class Segment:
    """Operations of one layer, in order."""

    layer: str
    backward: bool
    ops: list[Operation] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer or 'model'}{BACKWARD if self.backward else ''}"


def partition(cut: Cut, waits: Waits) -> list[Segment]:
    """The wafer's segments in order of execution. Views are left out: they are made where they are read."""
    early = _early_ops(cut, waits) | _random_keys(cut)
    runs: list[Segment] = []
    if early:
        runs.append(Segment(INPUT, False, [op for op in cut.wafer_ops if op in early]))
    current: Segment | None = None
    inside: set[Operation] = set()
    for op in cut.wafer_ops:
        if op in early or op in cut.sunk:
            continue
        source = source_of(op)
        layer = layer_of(source.module) or (current.layer if current is not None else "")
        same = current is not None and (layer, source.backward) == (current.layer, current.backward)
        if not same or any(value.owner in inside for value in waits.returned(op)):
            current = Segment(layer, source.backward)
            inside = set()
            runs.append(current)
        assert current is not None
        current.ops.append(op)
        inside.update(closure([op], cut.sunk))
    return _absorb(cut, waits, _join(cut, waits, runs))


def _absorb(cut: Cut, waits: Waits, runs: list[Segment]) -> list[Segment]:
    """A segment with no weights to wait for and no gradients to send (an activation function) joins the one before."""
    streamed = set(cut.streamed)

    def stands_alone(run: Segment) -> bool:
        reads_weights = any(value in streamed for value in inputs_of(closure(run.ops, cut.sunk)))
        sends = any(result in cut.sharding.reduced for op in run.ops for result in op.results)
        return reads_weights or sends or any(waits.returned(op) for op in run.ops)

    kept: list[Segment] = []
    for run in runs:
        before = kept[-1] if kept else None
        if before is None or before.layer == INPUT or before.backward != run.backward or stands_alone(run):
            kept.append(run)
        else:
            before.ops += run.ops
    return kept


def _early_ops(cut: Cut, waits: Waits) -> set[Operation]:
    """What leads from the batch alone to reductions that the wafers wait for: done first, it hides behind the rest."""
    wafer_ops = set(cut.wafer_ops)
    streamed = set(cut.streamed)
    early: set[Operation] = set()
    for value in dict.fromkeys(value for op in cut.wafer_ops for value in waits.back(op)):
        cone = _cone(value, wafer_ops)
        if not any(operand in streamed or operand in cut.sharding.reduced for op in cone for operand in op.operands):
            early |= cone
    return early


def _random_keys(cut: Cut) -> set[Operation]:
    """What makes the keys of random operations, which differ in each layer: equal layers then are one kernel."""
    wafer_ops = set(cut.wafer_ops)
    return {
        op
        for op in wafer_ops
        if all(isinstance(operand.owner, Block | Const) for operand in op.operands)
        and any(use.operation in wafer_ops and _is_key(use) for result in op.results for use in result.uses)
    }


def _is_key(use: Use) -> bool:
    row = spec(use.operation.name)
    return row.random and row.operands[use.index].name == "key"


def _cone(value: SSAValue, within: set[Operation]) -> set[Operation]:
    cone: set[Operation] = set()
    stack = [value.owner]
    while stack:
        op = stack.pop()
        if isinstance(op, Operation) and op in within and op not in cone:
            cone.add(op)
            stack.extend(operand.owner for operand in op.operands)
    return cone


def _join(cut: Cut, waits: Waits, runs: list[Segment]) -> list[Segment]:
    """Moves a run to the last segment of its layer and pass, if all that it needs is there by then."""
    joined: list[Segment] = []
    home: dict[SSAValue, int] = {}
    latest: dict[str, int] = {}
    for run in runs:
        needed = [home.get(value, -1) for value in inputs_of(closure(run.ops, cut.sunk))]
        # A value that comes back from a reduction must have left in an earlier segment.
        needed += [home.get(value, -1) + 1 for op in run.ops for value in waits.returned(op)]
        place = latest.get(run.label)
        if place is None or max(needed, default=-1) > place:
            place = latest[run.label] = len(joined)
            joined.append(Segment(run.layer, run.backward))
        joined[place].ops += run.ops
        home.update((result, place) for op in run.ops for result in op.results)
    return joined

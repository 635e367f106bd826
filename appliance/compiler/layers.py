"""Layers: the wafer's work cut into segments by the module that each operation comes from.

A layer is a module path up to its first list index (h.3.attention -> h.3). A segment is what a layer does in one go:
its part of the forward pass, or of the backward pass. Segments are runs in the order of the trace, which is always a
valid order; a run is joined to an earlier one of the same layer if nothing that it needs was made in between.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cut import Cut, is_constant
from cirh.locations import source_of

_UP_TO_INDEX = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")
# Without a list in the path: as deep as this.
_DEPTH = 2
# The layer of what is made of the batch alone, before all others.
INPUT = "input"


@dataclass(slots=True, eq=False)
class Segment:
    """Operations of one layer, in order."""

    layer: str
    backward: bool
    ops: list[Operation] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer or 'model'}{' backward' if self.backward else ''}"


def layer_of(module_path: str) -> str:
    """The layer of a module path; "" for operations outside all modules."""
    indexed = _UP_TO_INDEX.match(module_path)
    return indexed.group(1) if indexed else ".".join(module_path.split(".")[:_DEPTH])


def partition(cut: Cut) -> list[Segment]:
    """The wafer's segments in order of execution. Views are left out: they are made where they are read."""
    early = _early_ops(cut)
    runs: list[Segment] = []
    if early:
        runs.append(Segment(INPUT, False, [op for op in cut.wafer_ops if op in early]))
    current: Segment | None = None
    for op in cut.wafer_ops:
        if op in early or op in cut.sunk:
            continue
        source = source_of(op)
        layer = layer_of(source.module) or (current.layer if current is not None else "")
        same = current is not None and (layer, source.backward) == (current.layer, current.backward)
        if not same or any(value.owner in current.ops for value in waits_of(cut, op)):  # type: ignore[union-attr]
            current = Segment(layer, source.backward)
            runs.append(current)
        assert current is not None
        current.ops.append(op)
    return _absorb(cut, _join(cut, runs))


def waits_of(cut: Cut, op: Operation) -> list[SSAValue]:
    """Reduced values that come back to the wafers for this operation. On one wafer they are there already."""
    if cut.sharding.num_csx == 1:
        return []
    wants = cut.sharding.outcomes[op].wants
    return [
        value
        for value, want in zip(op.operands, wants, strict=True)
        if value in cut.sharding.reduced and not want.is_partial
    ]


def closure(ops: Iterable[Operation], sunk: frozenset[Operation]) -> list[Operation]:
    """The operations with the sunk ones that they read, in order of execution."""
    ops = list(ops)
    done: set[Operation] = set(ops)
    ordered: list[Operation] = []

    def need(op: Operation) -> None:
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, Operation) and owner not in done and owner in sunk:
                done.add(owner)
                need(owner)
        ordered.append(op)

    for op in ops:
        need(op)
    return ordered


def inputs_of(ops: Iterable[Operation]) -> list[SSAValue]:
    """What the operations read and do not make, in order of first use; constants excluded."""
    made: set[SSAValue] = set()
    found: dict[SSAValue, None] = {}
    for op in ops:
        for operand in op.operands:
            if operand not in made and not is_constant(operand):
                found.setdefault(operand)
        made.update(op.results)
    return list(found)


def _absorb(cut: Cut, runs: list[Segment]) -> list[Segment]:
    """A segment that reads nothing streamed (an activation function) is part of the one before, in the same pass."""
    streamed = set(cut.streamed)
    kept: list[Segment] = []
    for run in runs:
        reads_weights = any(value in streamed for value in inputs_of(closure(run.ops, cut.sunk)))
        waits = any(waits_of(cut, op) for op in run.ops)
        before = kept[-1] if kept else None
        if before is None or reads_weights or waits or before.layer == INPUT or before.backward != run.backward:
            kept.append(run)
        else:
            before.ops += run.ops
    return kept


def _early_ops(cut: Cut) -> set[Operation]:
    """What leads from the batch alone to reductions that the wafers wait for: done first, it hides behind the rest."""
    if cut.sharding.num_csx == 1:
        return set()
    wafer_ops = set(cut.wafer_ops)
    streamed = set(cut.streamed)
    waited_for = [value for op in cut.wafer_ops for value in waits_of(cut, op)]
    early: set[Operation] = set()
    for value in waited_for:
        cone = _cone(value, wafer_ops)
        if not any(operand in streamed or operand in cut.sharding.reduced for op in cone for operand in op.operands):
            early |= cone
    return early


def _cone(value: SSAValue, within: set[Operation]) -> set[Operation]:
    cone: set[Operation] = set()
    stack = [value.owner]
    while stack:
        op = stack.pop()
        if isinstance(op, Operation) and op in within and op not in cone:
            cone.add(op)
            stack.extend(operand.owner for operand in op.operands)
    return cone


def _join(cut: Cut, runs: list[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    home: dict[SSAValue, int] = {}
    for run in runs:
        candidates = (i for i in reversed(range(len(joined))) if joined[i].label == run.label)
        place = next(candidates, None)
        needed = [home.get(value, -1) for value in inputs_of(closure(run.ops, cut.sunk))]
        # A value that comes back from a reduction must have left in an earlier segment.
        needed += [home.get(value, -1) + 1 for op in run.ops for value in waits_of(cut, op)]
        if place is None or max(needed, default=-1) > place:
            place = len(joined)
            joined.append(Segment(run.layer, run.backward))
        joined[place].ops += run.ops
        home.update((result, place) for op in run.ops for result in op.results)
    return joined

"""Layers: the wafers' work divided into segments by module, and the reduced values that each operation waits for."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from xdsl.ir import Block, Operation, SSAValue, Use

from appliance.compiler.core.rewriter import layer_of
from appliance.compiler.partition.cut import Cut, is_constant
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.table.lookup import spec

# A list of modules within another is divided instead of that one if it has so many times as many members.
_MUCH_LONGER: Final = 4

# --- Waits ------------------------------------------------------------------------------------------------------------


def closure(ops: Iterable[Operation], sunk: Collection[Operation]) -> list[Operation]:
    """The operations, and those of the sunk ones that they read, in order of execution."""
    ops = list(ops)
    done: set[Operation] = set(ops)
    ordered: list[Operation] = []
    for op in ops:
        waiting = [(op, iter(op.operands))]  # a stack, as chains of operations may be long
        while waiting:
            last, operands = waiting[-1]
            for operand in operands:
                owner = operand.owner
                if isinstance(owner, Operation) and owner not in done and owner in sunk:
                    done.add(owner)
                    waiting.append((owner, iter(owner.operands)))
                    break
            else:
                ordered.append(last)
                waiting.pop()
    return ordered


def inputs_of(ops: Iterable[Operation]) -> list[SSAValue]:
    """Values that the operations read and do not make, in order of first use, without constants."""
    made: set[SSAValue] = set()
    found: dict[SSAValue, None] = {}
    for op in ops:
        for operand in op.operands:
            if operand not in made and not is_constant(operand):
                found.setdefault(operand)
        made.update(op.results)
    return list(found)


class Waits:
    """The reduced values that each operation of the wafers waits for, directly or by way of MemoryX.

    A value that comes back to the wafers must have left before. So an operation that reads it belongs to a later
    segment than the operation that makes it.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._streamed = set(cut.streamed)
        self._made_of = _made_of_reduced(cut)
        self._awaited: dict[Operation, frozenset[SSAValue]] = {}

    def is_late(self, value: SSAValue) -> bool:
        """Whether MemoryX computes a value from reduced values of the same step."""
        return value in self._made_of

    def returned(self, op: Operation) -> list[SSAValue]:
        """Reduced values that come back to the wafers for this operation; none on one wafer, which has them already."""
        if self._cut.sharding.num_parts == 1:
            return []
        needs = self._cut.sharding.outcomes[op].operands
        return [
            value
            for value, want in zip(op.operands, needs, strict=True)
            if value in self._cut.sharding.reduced and not want.is_partial
        ]

    def awaited(self, op: Operation) -> frozenset[SSAValue]:
        """Reduced values that must have left the wafers before this operation, or a sunk one that it reads, is run."""
        if op not in self._awaited:
            found: set[SSAValue] = set()
            for part in closure([op], self._cut.sunk):
                found.update(self.returned(part))
                for operand in part.operands:
                    if operand in self._streamed:
                        found |= self._made_of.get(operand, frozenset())
            self._awaited[op] = frozenset(found)
        return self._awaited[op]


def _made_of_reduced(cut: Cut) -> dict[SSAValue, frozenset[SSAValue]]:
    """By value that MemoryX computes: the reduced values from which it is computed."""
    made_of: dict[SSAValue, frozenset[SSAValue]] = {}
    for op in cut.memoryx_ops:
        reduced = {operand for operand in op.operands if operand in cut.sharding.reduced}
        for operand in op.operands:
            if operand not in reduced:
                reduced |= made_of.get(operand, frozenset())
        if reduced:
            made_of.update(dict.fromkeys(op.results, frozenset(reduced)))
    return made_of


# --- Segments ---------------------------------------------------------------------------------------------------------
#
# A layer is a module path up to its first list index (h.3.attention -> h.3). A segment is the part of a layer in the
# forward or in the backward pass. Consecutive operations of the trace, whose order is always valid, make a segment; it
# is joined to an earlier one of the same layer and pass if none of its inputs was made in between.

# The layer of values that are computed from the batch alone, and of keys of random numbers. It comes before all others.
INPUT = "input"
# Suffix of the label of a segment of the backward pass.
BACKWARD = " backward"


@dataclass(slots=True, eq=False)
class Segment:
    """Operations of one layer and pass, in order, that a wafer runs together: one kernel."""

    layer: str
    backward: bool
    ops: list[Operation] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer or 'model'}{BACKWARD if self.backward else ''}"


def partition(
    cut: Cut, waits: Waits, *, in_slices: bool = False, gradients_apart: bool = False, in_sublayers: bool = False
) -> list[Segment]:
    """The wafer's segments in order of execution, without sunk operations, which are repeated where they are read.

    in_slices: whether kernels compute rows in slices. What one kernel passes on to another exists for all slices, so
        operations without weights, such as a loss, then belong to the segment of the values that they read. A list of
        models has a segment for each layer of each model then.
    gradients_apart: whether a segment that sends the gradient of a matrix, such as that of an embedding, belongs to no
        other in any case, so that there is room for the gradients of one of the two at a time.
    in_sublayers: whether a layer is divided into sublayers between which no more values pass than into the layer, such
        as attention and the products behind it, so that there is room for the weights of one of them at a time.
    """
    paths = {source_of(op).module for op in cut.wafer_ops}
    layers = _small_layers(paths) if in_slices else {path: layer_of(path) for path in paths}
    if in_sublayers:
        layers = _sublayers(cut, layers)
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
        # An operation outside all modules belongs to the layer before it.
        layer = layers[source.module] or (current.layer if current is not None else "")
        same = current is not None and (layer, source.backward) == (current.layer, current.backward)
        # A wafer sends reductions after a segment, so an operation that waits for one of this segment begins another.
        if not same or any(value.owner in inside for value in waits.awaited(op)):
            current = Segment(layer, source.backward)
            inside = set()
            runs.append(current)
        assert current is not None
        current.ops.append(op)
        inside.update(closure([op], cut.sunk))
    joined = _join(cut, waits, runs)
    return _absorb(cut, waits, joined, in_slices=in_slices, gradients_apart=gradients_apart)


def _small_layers(paths: Collection[str]) -> dict[str, str]:
    """By module path, its layer: a member of a long list of modules, also if that is in a short list, as of models."""
    members: dict[str, set[str]] = defaultdict(set)
    lists: dict[str, list[tuple[str, str]]] = {}  # by path: the lists on it, each with the path up to its member
    for path in paths:
        parts = path.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()]
        lists[path] = [(".".join(parts[:place]), ".".join(parts[: place + 1])) for place in places]
        for name, member in lists[path]:
            members[name].add(member)
    found = {}
    for path in paths:
        longest = max((len(members[name]) for name, _ in lists[path]), default=0)
        long = (member for name, member in lists[path] if len(members[name]) * _MUCH_LONGER > longest)
        found[path] = next(long, layer_of(path))
    return found


def _sublayers(cut: Cut, layers: Mapping[str, str]) -> dict[str, str]:
    """By module path, its sublayer, which has the name of its last module; "" for the layer itself.

    A sublayer ends with a module of the layer after which no more bytes are read that the layer has read or made before
    than it reads from other layers.
    """
    passed = cut.parts
    forward: dict[str, list[_Reads]] = defaultdict(list)
    for op in cut.wafer_ops:
        source = source_of(op)
        layer = layers[source.module]
        if layer and not source.backward and op not in cut.sunk:
            read = [value for value in inputs_of(closure([op], cut.sunk)) if value in passed]
            forward[layer].append(_Reads(op, _module_in(layer, source.module), read))
    sublayers = dict(layers)
    for layer, ops in forward.items():
        found = _modules_of_sublayers(ops)
        if len(set(found.values())) > 1:
            sublayers.update((path, found.get(_module_in(layer, path), "")) for path in layers if layers[path] == layer)
    return sublayers


@dataclass(frozen=True, slots=True)
class _Reads:
    """An operation, the module of its layer that it belongs to, and the values of the batch that it reads."""

    op: Operation
    module: str
    read: Sequence[SSAValue]


def _module_in(layer: str, path: str) -> str:
    """The module of a layer, or member of a list in it, on a path within the layer; "" if it is the layer's own."""
    inside = path.split(".")[layer.count(".") + 1 :]
    size = next((size for size, name in enumerate(inside) if size and not name.isdecimal()), len(inside))
    return ".".join([layer, *inside[:size]]) if inside else ""


def _modules_of_sublayers(ops: Sequence[_Reads]) -> dict[str, str]:
    """By module of a layer, the last module of its sublayer. ops: those of the layer's forward pass, in order."""
    last = {each.module: number for number, each in enumerate(ops)}
    last_read = {value: number for number, each in enumerate(ops) for value in each.read}
    made = {result for each in ops for result in each.op.results}
    entering = sum(types.nbytes(value) for value in last_read if value not in made)
    passing: dict[SSAValue, None] = {}  # values that are read from here on, and were read or made before
    found: dict[str, str] = {}
    modules: list[str] = []  # of the present sublayer
    for number, each in enumerate(ops):
        if each.module and each.module not in modules:
            modules.append(each.module)
        passing.update(dict.fromkeys(value for value in (*each.read, *each.op.results) if value in last_read))
        for value in [value for value in passing if last_read[value] <= number]:
            del passing[value]
        is_end = number + 1 == len(ops) or ops[number + 1].module not in ("", *modules)
        is_complete = modules and is_end and all(last[module] <= number for module in modules)
        if is_complete and sum(map(types.nbytes, passing)) <= entering:
            found.update(dict.fromkeys(modules, modules[-1]))
            modules.clear()
    return found


def _absorb(cut: Cut, waits: Waits, runs: list[Segment], *, in_slices: bool, gradients_apart: bool) -> list[Segment]:
    """Joins segments that neither wait for weights nor send gradients, such as activation functions, to those before.

    Alone, such a segment would only be one more kernel to call. Those that send something are joined for slices.
    """
    streamed = set(cut.streamed)

    def stands_alone(run: Segment) -> bool:
        reads_weights = any(value in streamed for value in inputs_of(closure(run.ops, cut.sunk)))
        sent = [result for op in run.ops for result in op.results if result in cut.sharding.reduced]
        sends_apart = bool(sent) and not in_slices
        if gradients_apart:
            sends_apart |= any(len(types.shape(value)) > 1 for value in sent)
        return reads_weights or sends_apart or any(waits.awaited(op) for op in run.ops)

    kept: list[Segment] = []
    for run in runs:
        before = kept[-1] if kept else None
        if before is None or before.layer == INPUT or before.backward != run.backward or stands_alone(run):
            kept.append(run)
        else:
            before.ops += run.ops
    return kept


def _early_ops(cut: Cut, waits: Waits) -> set[Operation]:
    """Operations on the batch alone that lead to reductions for which the wafers wait.

    They are run first, so that the reductions overlap with the rest of the forward pass.
    """
    wafer_ops = set(cut.wafer_ops)
    streamed = set(cut.streamed)
    early: set[Operation] = set()
    for value in dict.fromkeys(value for op in cut.wafer_ops for value in waits.returned(op)):
        cone = _cone(value, wafer_ops)
        if not any(operand in streamed or operand in cut.sharding.reduced for op in cone for operand in op.operands):
            early |= cone
    return early


def _random_keys(cut: Cut) -> set[Operation]:
    """Operations that make keys of random numbers: they differ in each layer, and would give each its own kernel."""
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
    """Joins each run of operations to the last segment of its layer and pass, if all its inputs are made by then."""
    joined: list[Segment] = []
    home: dict[SSAValue, int] = {}
    latest: dict[str, int] = {}
    for run in runs:
        needed = [home.get(value, -1) for value in inputs_of(closure(run.ops, cut.sunk))]
        # A value that comes back from a reduction must have left in an earlier segment, hence the + 1.
        needed += [home.get(value, -1) + 1 for op in run.ops for value in waits.awaited(op)]
        place = latest.get(run.label)
        if place is None or max(needed, default=-1) > place:
            place = latest[run.label] = len(joined)
            joined.append(Segment(run.layer, run.backward))
        joined[place].ops += run.ops
        home.update((result, place) for op in run.ops for result in op.results)
    return joined

"""What an operation on the wafers has to wait for: reduced values, and weights that are made of them.

A value that comes back must have left before: the operation that reads it belongs to a later segment than the one that
makes it.
"""

from collections.abc import Iterable

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.cut import Cut, is_constant


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


class Waits:
    """Of all operations of a cut."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._streamed = set(cut.streamed)
        self._made_of = _made_of_reduced(cut)
        self._returned: dict[Operation, frozenset[SSAValue]] = {}

    def is_late(self, value: SSAValue) -> bool:
        """Whether MemoryX knows a value only when something of the same step has been reduced."""
        return value in self._made_of

    def back(self, op: Operation) -> list[SSAValue]:
        """Reduced values that come back to the wafers for this operation. On one wafer they are there already."""
        if self._cut.sharding.num_parts == 1:
            return []
        wants = self._cut.sharding.outcomes[op].wants
        return [
            value
            for value, want in zip(op.operands, wants, strict=True)
            if value in self._cut.sharding.reduced and not want.is_partial
        ]

    def returned(self, op: Operation) -> frozenset[SSAValue]:
        """Reduced values that must have left the wafers before this operation, with the sunk ones that it reads."""
        if op not in self._returned:
            found: set[SSAValue] = set()
            for part in closure([op], self._cut.sunk):
                found.update(self.back(part))
                for operand in part.operands:
                    if operand in self._streamed:
                        found |= self._made_of.get(operand, frozenset())
            self._returned[op] = frozenset(found)
        return self._returned[op]


def _made_of_reduced(cut: Cut) -> dict[SSAValue, frozenset[SSAValue]]:
    """For what MemoryX computes from reduced values: which."""
    made_of: dict[SSAValue, frozenset[SSAValue]] = {}
    for op in cut.memoryx_ops:
        reduced = {operand for operand in op.operands if operand in cut.sharding.reduced}
        for operand in op.operands:
            if operand not in reduced:
                reduced |= made_of.get(operand, frozenset())
        if reduced:
            made_of.update(dict.fromkeys(op.results, frozenset(reduced)))
    return made_of

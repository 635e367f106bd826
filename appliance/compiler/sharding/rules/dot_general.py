"""Sharding rules: general products (cirh.DotGeneral)."""

from collections.abc import Sequence

from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, rule


class _Side:
    """One operand: its dimensions that pair with one of the other (batch, or summed over), and the rest (free)."""

    def __init__(self, query: Query, index: int, prefix: str) -> None:
        self.placement = query.placements[index]
        self.batch: Sequence[int] = query.get(f"{prefix}_batching_dimensions")
        self.summed: Sequence[int] = query.get(f"{prefix}_contracting_dimensions")
        self.free = [dim for dim in range(len(query.shape(index))) if dim not in (*self.batch, *self.summed)]

    @property
    def is_paired(self) -> bool:
        """Whether the cut dimension has a partner in the other operand."""
        return self.placement.dim in (*self.batch, *self.summed)

    def partner(self, other: "_Side") -> Placement:
        """The placement of the other operand that belongs to this one's, whose dimension is paired."""
        cut = self.placement
        mine, others = (self.batch, other.batch) if cut.dim in self.batch else (self.summed, other.summed)
        return cut.at(others[list(mine).index(cut.dim)])

    def result(self, before: int) -> Placement:
        """The placement of the result. before: number of free dimensions of the operands before this one."""
        cut = self.placement
        if cut.dim in self.summed:
            return SUM
        if cut.dim in self.batch:
            return cut.at(list(self.batch).index(cut.dim))
        return cut.at(len(self.batch) + before + self.free.index(cut.dim))


@rule("cirh.DotGeneral")
def dot_general(query: Query) -> Outcome:
    left, right = _Side(query, 0, "lhs"), _Side(query, 1, "rhs")
    if not query.sharded:
        partial = list(query.placements)
        return Outcome(operands=partial, results=[SUM]) if sorted(map(str, partial)) == _ONE_SUM else query.replicated()
    if len(query.sharded) == 2 and left.is_paired and right.is_paired and left.partner(right) != right.placement:
        raise query.mixes(f"multiplies operands that are cut differently ({left.placement} and {right.placement})")
    if left.placement.is_sharded and left.is_paired:
        needs = [left.placement, left.partner(right)]
        return _unless_batch(query, right, Outcome(operands=needs, results=[left.result(0)]))
    if right.placement.is_sharded and right.is_paired:
        needs = [right.partner(left), right.placement]
        return _unless_batch(query, left, Outcome(operands=needs, results=[right.result(len(left.free))]))
    # All samples by all samples: each wafer makes the rows or columns of its own samples, with the other operand whole.
    if left.placement.is_sharded:
        return Outcome(operands=[left.placement, R], results=[left.result(0)])
    return Outcome(operands=[R, right.placement], results=[right.result(len(left.free))])


_ONE_SUM = sorted(map(str, (R, SUM)))


def _unless_batch(query: Query, other: _Side, outcome: Outcome) -> Outcome:
    """The outcome; an error if the other operand is sharded in a free dimension."""
    if other.placement.is_sharded and not other.is_paired:
        raise query.mixes(f"multiplies operands that are cut differently ({' and '.join(map(str, query.placements))})")
    return outcome

"""Sharding rules: cross entropy of logits that a product makes. Rows may be sharded; weights are whole everywhere."""

from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, rule


@rule("cirh.LinearCrossEntropy")
def linear_cross_entropy(query: Query) -> Outcome:
    cut = _cut(query, [0, 2])
    if cut is None:
        return query.replicated()
    return Outcome(operands=[cut, R, cut, *[R] * (len(query.operands) - 3)], results=[cut] * 3)


@rule("cirh.LinearCrossEntropyGrad")
def linear_cross_entropy_grad(query: Query) -> Outcome:
    cut = _cut(query, [0, 1, 2, 3, 4, 6])
    if cut is None:
        return query.replicated()
    needs = [cut] * 5 + [R, cut] + [R] * (len(query.operands) - 7)
    return Outcome(operands=needs, results=[cut, *[SUM] * (len(query.op.results) - 1)])


def _cut(query: Query, rows: list[int]) -> Placement | None:
    """The placement of the rows; None if nothing is sharded."""
    if not query.sharded:
        return None
    cut = next((query.placements[index] for index in rows if query.placements[index].is_sharded), None)
    if cut is None or cut.dim != 0:
        raise query.mixes("has classes or features of different samples")
    return cut

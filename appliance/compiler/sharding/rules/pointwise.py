"""Sharding rules: element-wise operations, and random numbers."""

from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, rule, sharded
from waferbox.cirh.dialect import types

# Linear in their one operand: a partial sum passes through.
_LINEAR = frozenset({"cirh.Neg"})
# Linear in all operands together.
_ADDITIVE = frozenset({"cirh.Add", "cirh.Sub"})


def pointwise(query: Query) -> Outcome:
    """Operations whose operands each have the result's shape, or rank 0."""
    if query.sharded:
        return _sharded(query)
    if query.placements and all(p in (R, SUM) for p in query.placements) and _passes_sum(query):
        return Outcome(operands=list(query.placements), results=[SUM] * len(query.op.results))
    return query.replicated()


def _sharded(query: Query) -> Outcome:
    cuts = set(query.sharded)
    if len(cuts) > 1:
        listed = " and ".join(sorted(str(cut) for cut in cuts))
        raise query.mixes(f"takes operands that are cut differently ({listed})")
    cut = cuts.pop()
    needs: list[Placement] = [cut if query.shape(i) else R for i in range(len(query.operands))]
    return Outcome(operands=needs, results=[cut] * len(query.op.results))


def _passes_sum(query: Query) -> bool:
    """Whether a partial sum may pass through the operation instead of being reduced first: whether it is linear."""
    name, placements = query.op.name, query.placements
    partial = [placement == SUM for placement in placements]
    if not any(partial):
        return False
    if name in _LINEAR:
        return True
    if name == "cirh.Cast":
        # A cast into a narrower type is not linear: it would round every part.
        narrow, wide = types.dtype(query.op.results[0]), types.dtype(query.operands[0])
        return narrow.is_floating_point and wide.is_floating_point and narrow.itemsize >= wide.itemsize
    if name in _ADDITIVE:
        return all(partial)
    if not types.dtype(query.op.results[0]).is_floating_point:
        return False
    if name == "cirh.Mul":
        return sum(partial) == 1
    if name == "cirh.Div":
        return partial[0] and not partial[1]
    return name == "cirh.Select" and partial == [False, True, True]


@rule(
    # Element-wise, but not tagged so in CIRH's table, as their operands may have different shapes.
    "aten.masked_fill.Tensor",
    "aten.where.Scalar",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.elu_backward",
    "aten.floor_divide",
    "aten.hardshrink_backward",
    "aten.softshrink_backward",
    "aten.hardsigmoid_backward",
    "aten.hardswish",
    "aten.hardswish_backward",
    "aten.hardtanh_backward",
    "aten.leaky_relu_backward",
    "aten.softplus_backward",
    "aten.log_sigmoid_forward",
    "aten.log_sigmoid_backward",
)
def pointwise_of_one_shape(query: Query) -> Outcome:
    shapes = {query.shape(index) for index in range(len(query.operands))} - {()}
    if query.sharded and shapes != {query.result_shape()}:
        raise query.mixes("takes operands of different shapes")
    return pointwise(query)


@rule("cirh.RandomUniform", "cirh.RandomNormal", "cirh.RandomBernoulli", "cirh.RandomInteger")
def random(query: Query) -> Outcome:
    """Draws the whole tensor; with an attribute `part` a part, by the numbers of the wafers in the last operand."""
    part = query.get("part")
    if part is None:
        return query.replicated()
    dim, outer, count = part
    if count != query.num_parts or query.shape(len(query.operands) - 1) != (count,):
        raise query.mixes(f"is drawn in {count} parts")
    return Outcome(operands=[*[R] * (len(query.operands) - 1), sharded(0)], results=[sharded(dim, outer)])

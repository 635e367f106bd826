"""Sharding rules: group norm and batch norm."""

from appliance.compiler.sharding.rules.rule import SUM, Decompose, Outcome, Query, R, rule
from waferbox.cirh.dialect import types

# The dimension for which batch norm has separate statistics.
CHANNELS = 1


@rule("aten.native_group_norm")
def group_norm(query: Query) -> Outcome:
    """Operands: input, [weight], [bias]. The batch size is an attribute."""
    if not query.sharded:
        return query.replicated()
    cut = query.placements[0]
    if not cut.is_sharded or cut.dim != 0:
        raise query.mixes("normalises over the samples")
    needs = [cut, *[R] * (len(query.operands) - 1)]
    return Outcome(operands=needs, results=[cut] * 3, attributes={"N": query.get("N") // query.num_parts})


@rule("aten.native_group_norm_backward")
def group_norm_backward(query: Query) -> Outcome:
    """Operands: grad_output, input, mean, rstd, [weight]. Results: the gradients of input, weight and bias."""
    cut = next((placement for placement in query.placements[:2] if placement.is_sharded), None)
    if cut is None:
        return query.replicated()
    if cut.dim != 0:
        raise query.mixes("normalises over the samples")
    needs = [cut] * 4 + [R] * (len(query.operands) - 4)
    return Outcome(operands=needs, results=[cut, SUM, SUM], attributes={"N": query.get("N") // query.num_parts})


@rule("aten._native_batch_norm_legit_functional", "aten._native_batch_norm_legit.no_stats")
def batch_norm(query: Query) -> Outcome:
    """Operands: input; weight, bias, running mean and variance, which have one element for each channel."""
    if not query.sharded:
        return query.replicated()
    cut = query.placements[0]
    if cut.is_sharded and cut.dim == CHANNELS:
        channels = cut.at(0)
        needs = [cut, *[channels] * (len(query.operands) - 1)]
        return Outcome(operands=needs, results=[cut, *[channels] * (len(query.op.results) - 1)])
    if not cut.is_sharded or not query.get("training"):
        raise query.mixes("takes weights or statistics that are cut, or none of the batch")
    raise Decompose


@rule("aten._native_batch_norm_legit_no_training")
def batch_norm_inference(query: Query) -> Outcome:
    """Operands as of `batch_norm`. The returned statistics are empty."""
    if not query.sharded:
        return query.replicated()
    cut = query.placements[0]
    if not cut.is_sharded:
        raise query.mixes("takes weights or statistics that are cut")
    channels = cut.at(0) if cut.dim == CHANNELS else R
    return Outcome(operands=[cut, *[channels] * (len(query.operands) - 1)], results=[cut, R, R])


@rule("aten.native_batch_norm_backward")
def batch_norm_backward(query: Query) -> Outcome:
    """Operands: grad_output, then as of `batch_norm`. Results: the gradients of input, weight and bias."""
    cut = next((placement for placement in query.placements[:2] if placement.is_sharded), None)
    if cut is None:
        return query.replicated()
    if cut.dim == CHANNELS:
        channels = cut.at(0)
        return Outcome(
            operands=[cut, cut, *[channels] * (len(query.operands) - 2)],
            results=[cut, *[R if types.shape(result) == (0,) else channels for result in query.op.results[1:]]],
        )
    if query.get("train"):
        raise Decompose
    return Outcome(operands=[cut, cut, *[R] * (len(query.operands) - 2)], results=[cut, SUM, SUM])

"""Sharding rules: attention. It mixes tokens, but neither samples nor heads."""

from appliance.compiler.sharding.rules.rule import Outcome, Placement, Query, R, rule

_FIRST_TOKENS = 2  # query, key and value: (batch, heads, tokens, features)


@rule("cirh.Attention")
def attention(query: Query) -> Outcome:
    cut, *others = query.placements[:3]
    if cut.is_sharded and cut.dim == _FIRST_TOKENS and others == [R, R] and not query.get("is_causal"):
        return _along_queries(query, cut)
    return _along_samples(query, 3, 2)


@rule("cirh.AttentionGrad")
def attention_grad(query: Query) -> Outcome:
    return _along_samples(query, 6, 3)


def _along_queries(query: Query, cut: Placement) -> Outcome:
    """The samples are the query's tokens; keys and values are the same for all of them."""
    masks = [cut.at(len(query.shape(3)) - 2) if query.shape(3)[-2] > 1 else R for _ in query.operands[3:]]
    return Outcome(operands=[cut, R, R, *masks], results=[cut, cut])


def _along_samples(query: Query, tensors: int, results: int) -> Outcome:
    """All operands are sharded alike, but for the mask, which is the last if there is one."""
    if not query.sharded:
        return query.replicated()
    needs = [_cut(query, tensors)] * tensors
    if len(query.operands) > tensors:
        needs.append(_of_mask(query, tensors, needs[0]))
    return Outcome(operands=needs, results=needs[:1] * results)


def _cut(query: Query, tensors: int) -> Placement:
    cut = next((placement for placement in query.placements[:tensors] if placement.is_sharded), None)
    if cut is None:
        # Only the mask is sharded: it alone differs from sample to sample.
        cut = query.placements[tensors]
        cut = cut.at(cut.dim + 4 - len(query.shape(tensors)))
    if cut.dim >= _FIRST_TOKENS:
        raise query.mixes(f"attends over the samples ({cut})")
    return cut


def _of_mask(query: Query, mask: int, cut: Placement) -> Placement:
    """The placement of the mask: replicated if it has one row for all samples."""
    shape = query.shape(mask)
    return cut if len(shape) == 4 and shape[cut.dim] > 1 else R

"""Sharding rules: attention. It mixes tokens, but neither samples nor heads."""

from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, rule

_FIRST_TOKENS = 2  # query, key and value: (batch, heads, tokens, features)


@rule("cirh.Attention")
def attention(query: Query) -> Outcome:
    cut, *others = query.placements[:3]
    if cut.is_sharded and cut.dim == _FIRST_TOKENS and others == [R, R] and _can_be_cut(query, cut, 3):
        return _along_queries(query, cut)
    return _along_samples(query, 3, 2)


@rule("cirh.AttentionGrad")
def attention_grad(query: Query) -> Outcome:
    number = query.get("mask_grad")
    cut, *others = query.placements[:4]
    are_queries = cut.is_sharded and cut.dim == _FIRST_TOKENS and others[0] in (R, cut) and others[1:] == [R, R]
    if are_queries and number is None and _can_be_cut(query, cut, 6):
        return _gradient_along_queries(query, cut)
    outcome = _along_samples(query, 6, 3)
    if number is None or not query.sharded:
        return outcome
    # The gradient of a mask that is the same for all samples is a sum over them.
    placement = outcome.operands[6 + number]
    return Outcome(operands=outcome.operands, results=[*outcome.results, placement if placement.is_sharded else SUM])


def _can_be_cut(query: Query, cut: Placement, tensors: int) -> bool:
    """Whether a part of the queries can attend alone. A causal mask depends on where the part begins."""
    return not query.get("is_causal") or (query.over_time and cut.outer == 1 and len(query.operands) == tensors)


def _position(query: Query) -> str:
    return "first_query" if query.get("is_causal") else ""


def _along_queries(query: Query, cut: Placement) -> Outcome:
    """The samples are the query's tokens; keys and values are the same for all of them."""
    operands = [cut, R, R, *_masks_along_queries(query, cut, 3)]
    return Outcome(operands=operands, results=[cut, cut], position=_position(query))


def _gradient_along_queries(query: Query, cut: Placement) -> Outcome:
    """As `_along_queries`. Each part of the queries adds to the gradients of all keys and values."""
    masks = _masks_along_queries(query, cut, 6)
    operands = [cut, cut, R, R, cut, cut, *masks]
    return Outcome(operands=operands, results=[cut, SUM, SUM], position=_position(query))


def _masks_along_queries(query: Query, cut: Placement, first: int) -> list[Placement]:
    shapes = [query.shape(index) for index in range(first, len(query.operands))]
    return [cut.at(len(shape) - 2) if shape[-2] > 1 else R for shape in shapes]


def _along_samples(query: Query, tensors: int, results: int) -> Outcome:
    """All operands are sharded alike, but for masks, which come last."""
    if not query.sharded:
        return query.replicated()
    cut = _cut(query, tensors)
    needs = [cut] * tensors + [_of_mask(query, index, cut) for index in range(tensors, len(query.operands))]
    return Outcome(operands=needs, results=[cut] * results)


def _cut(query: Query, tensors: int) -> Placement:
    cut = next((placement for placement in query.placements[:tensors] if placement.is_sharded), None)
    if cut is None:
        # Only masks are sharded: they alone differ from sample to sample.
        index = next(index for index, placement in enumerate(query.placements) if placement.is_sharded)
        cut = query.placements[index]
        cut = cut.at(cut.dim + 4 - len(query.shape(index)))
    if cut.dim >= _FIRST_TOKENS:
        raise query.mixes(f"attends over the samples ({cut})")
    return cut


def _of_mask(query: Query, mask: int, cut: Placement) -> Placement:
    """The placement of the mask: replicated if it has one row for all samples."""
    shape = query.shape(mask)
    return cut if len(shape) == 4 and shape[cut.dim] > 1 else R

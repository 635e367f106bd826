"""Sharding rules: sums, maxima, means, norms, cumulative operations, sorting, softmax."""

from appliance.compiler.sharding.rules.rule import MAX, MIN, SUM, Decompose, Outcome, Placement, Query, R, rule
from waferbox.cirh.dialect import types

_PARTIALS = {"ADD": SUM, "MAX": MAX, "MIN": MIN}


def kept_dim(query: Query, placement: Placement, dims: set[int], keepdim: bool) -> Placement | None:
    """The placement after a reduction of some dimensions; None if the sharded dimension is one of them."""
    if placement.dim in dims:
        return None
    return placement.at(placement.dim - (0 if keepdim else sum(dim < placement.dim for dim in dims)))


def _dims(query: Query, name: str) -> set[int]:
    """The reduced dimensions; all of them where the attribute is absent or empty."""
    given = query.get(name)
    rank = len(query.shape(0))
    if given is None or given == []:
        return set(range(rank))
    listed = given if isinstance(given, (list, tuple)) else [given]
    return {query.axis(dim) for dim in listed}


@rule("cirh.Reduce")
def reduce(query: Query) -> Outcome:
    placement = query.placements[0]
    kind = query.get("reduce_kind")
    dims = {query.axis(dim) for dim in query.get("dimensions")}
    if not placement.is_sharded:
        passes = placement if placement == SUM and kind == "ADD" else R
        return Outcome(operands=[passes], results=[passes])
    kept = kept_dim(query, placement, dims, bool(query.get("keep_dims")))
    if kept is not None:
        return Outcome(operands=[placement], results=[kept])
    partial = _PARTIALS.get(kind)
    if partial is None or types.dtype(query.op.results[0]).itemsize < types.dtype(query.operands[0]).itemsize:
        raise query.mixes(f"of kind {kind} goes over the samples")
    return Outcome(operands=[placement], results=[partial])


@rule("aten.amax", "aten.amin")
def extremum(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    kept = kept_dim(query, placement, _dims(query, "dim"), bool(query.get("keepdim", False)))
    partial = MAX if query.op.name == "aten.amax" else MIN
    return Outcome(operands=[placement], results=[partial if kept is None else kept])


@rule("aten.any", "aten.any.dim", "aten.any.dims", "aten.all", "aten.all.dim", "aten.all.dims")
def truth(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    kept = kept_dim(query, placement, _dims(query, "dim"), bool(query.get("keepdim", False)))
    partial = MAX if query.op.name.startswith("aten.any") else MIN
    return Outcome(operands=[placement], results=[partial if kept is None else kept])


def _kept_or_decomposed(query: Query, placement: Placement, dims: set[int]) -> Outcome:
    """The outcome of a reduction that is not a sum. Raises Decompose if it goes over the samples."""
    kept = kept_dim(query, placement, dims, bool(query.get("keepdim", False)))
    if kept is None and query.num_parts > 1:
        raise Decompose
    return Outcome(operands=[placement], results=[SUM if kept is None else kept] * len(query.op.results))


@rule("aten.mean", "aten.mean.dim")
def mean(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        passes = placement if placement == SUM else R
        return Outcome(operands=[passes], results=[passes])
    return _kept_or_decomposed(query, placement, _dims(query, "dim"))


@rule(
    "aten.linalg_vector_norm",
    "aten.var.correction",
    "aten.std.correction",
    "aten.var_mean.correction",
    "cirh.L2Norm",
)
def norm(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    return _kept_or_decomposed(query, placement, _dims(query, "dims" if query.op.name == "cirh.L2Norm" else "dim"))


@rule(
    "aten.max.dim",
    "aten.min.dim",
    "aten.prod.dim_int",
    "aten.prod",
    "aten.median",
    "aten.median.dim",
    "aten.nanmedian",
    "aten.nanmedian.dim",
    "aten.mode",
)
def not_over_samples(query: Query) -> Outcome:
    """Reductions that cannot be computed from the reductions of parts."""
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    kept = kept_dim(query, placement, _dims(query, "dim"), bool(query.get("keepdim", False)))
    if kept is None:
        raise query.mixes("goes over the samples")
    return Outcome(operands=[placement], results=[kept] * len(query.op.results))


def along(query: Query, axis: int) -> Outcome:
    """The outcome of an operation along one dimension that keeps all; the sharded one must be another.

    All operands are sharded alike.
    """
    if not query.sharded:
        return query.replicated()
    cut = query.sharded[0]
    if cut.dim == axis:
        raise query.mixes(f"goes along the samples ({cut})")
    return Outcome(operands=[cut] * len(query.operands), results=[cut] * len(query.op.results))


@rule("cirh.Softmax")
def softmax(query: Query) -> Outcome:
    return _whole_or_along(query, query.axis(query.get("axis", -1)))


@rule(
    "aten._softmax",
    "aten._softmax_backward_data",
    "aten._log_softmax",
    "aten._log_softmax_backward_data",
)
def softmax_of_torch(query: Query) -> Outcome:
    return _whole_or_along(query, query.axis(query.get("dim", -1)))


def _whole_or_along(query: Query, axis: int) -> Outcome:
    """As `along`, but gathers if the operation goes along the samples.

    Losses on scores of all samples by all samples (contrastive ones) take a softmax along both dimensions.
    """
    over_samples = query.sharded and query.sharded[0].dim == axis
    return query.replicated() if over_samples else along(query, axis)


@rule("aten.logsumexp")
def logsumexp(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    kept = kept_dim(query, placement, _dims(query, "dim"), bool(query.get("keepdim", False)))
    return query.replicated() if kept is None else Outcome(operands=[placement], results=[kept])


@rule(
    "aten.cumsum",
    "aten.cumprod",
    "aten.cummax",
    "aten.cummin",
    "aten.logcumsumexp",
    "aten.topk",
    "aten.sort",
    "aten.sort.stable",
)
def running(query: Query) -> Outcome:
    """Cumulative operations, and sorting."""
    return along(query, query.axis(query.get("dim", -1)))


@rule("cirh.MaskFromTopK")
def mask_from_topk(query: Query) -> Outcome:
    """Operands: input, and k, which is one number or one for each row."""
    data = query.placements[0]
    if not data.is_sharded:
        return query.replicated()
    if data.dim == query.axis(query.get("dimension")):
        raise query.mixes(f"goes along the samples ({data})")
    return Outcome(operands=[data, data if query.shape(1) else R], results=[data])

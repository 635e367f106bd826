"""Sharding rules: operations of the real dialect that pick elements by index, write to picked ones, or pad."""

from collections.abc import Callable

from appliance.compiler.sharding.rules.index import is_zero
from appliance.compiler.sharding.rules.reduction import along
from appliance.compiler.sharding.rules.rule import SUM, Outcome, Query, R, rule
from appliance.compiler.sharding.rules.shape import move
from waferbox.cirh.dialect.operations import Const

_AMOUNTS = ("edge_padding_low", "edge_padding_high", "interior_padding", "edge_unpadding_high")


@rule("cirh.Gather")
def gather(query: Query) -> Outcome:
    """Operands: input, indices. They share the first `batch_dims` dimensions."""
    source, indices = query.placements
    batch, axis = query.get("batch_dims", 0), query.axis(query.get("axis", 0))
    if not query.sharded:
        return query.replicated()
    cut = query.sharded[0]
    if cut.dim < batch:
        return Outcome(operands=[cut, cut], results=[cut])
    if source.is_sharded and (source.dim == axis or indices.is_sharded):
        raise query.mixes("picks from the dimension of the samples")
    if source.is_sharded:
        more = len(query.shape(1)) - batch - 1 if source.dim > axis else 0
        return Outcome(operands=[source, R], results=[source.at(source.dim + more)])
    return Outcome(operands=[R, indices], results=[indices.at(indices.dim - batch + axis)])


@rule("cirh.GatherNd")
def gather_nd(query: Query) -> Outcome:
    """Operands: input, and rows of coordinates. They share the first `start_dim` dimensions."""
    if not query.sharded:
        return query.replicated()
    source, indices = query.placements
    batch, last = query.get("start_dim", 0), len(query.shape(1)) - 1
    cut = query.sharded[0]
    if cut.dim < batch:
        return Outcome(operands=[cut, cut], results=[cut])
    behind = batch + query.shape(1)[last]
    if indices.is_sharded and not source.is_sharded and indices.dim < last:
        return Outcome(operands=[R, indices], results=[indices])
    if source.is_sharded and not indices.is_sharded and source.dim >= behind:
        return Outcome(operands=[source, R], results=[source.at(source.dim - behind + last)])
    raise query.mixes("picks from the dimension of the samples")


@rule("cirh.ScatterNd")
def scatter_nd(query: Query) -> Outcome:
    """Operands: init, indices, updates. If init is zero, the samples of each wafer make a partial sum."""
    init, indices, updates = query.placements
    if not query.sharded:
        adds = updates == SUM and indices == R and is_zero(query.operands[0])
        return Outcome(operands=[R, R, SUM], results=[SUM]) if adds else query.replicated()
    last = len(query.shape(1)) - 1
    cut = indices if indices.is_sharded else updates
    if init.is_sharded or cut.dim >= last or not is_zero(query.operands[0]):
        raise query.mixes("adds samples to something else than zeros, or parts of samples")
    return Outcome(operands=[R, cut, cut], results=[SUM])


@rule("cirh.TopK")
def topk(query: Query) -> Outcome:
    return along(query, query.axis(query.get("dimension")))


@rule("cirh.CumSum", "cirh.CumProd")
def running(query: Query) -> Outcome:
    return along(query, query.axis(query.get("axis")))


@rule("cirh.SoftmaxCrossEntropyWithLogits")
def soft_cross_entropy(query: Query) -> Outcome:
    """Operands: features, labels. Results: the loss, of one dimension less, and the gradient."""
    axis = query.axis(query.get("axis", -1))
    outcome = along(query, axis)
    whole = outcome.results[0]
    if not whole.is_sharded:
        return outcome
    return Outcome(operands=outcome.operands, results=[whole.at(whole.dim - (whole.dim > axis)), whole])


def _moved(query: Query, new_dim: Callable[[int], int | None]) -> Outcome:
    """As `move`, for an operation whose further operands are constants."""
    moved = move(Query(query.op, query.placements[:1], query.num_parts), new_dim)
    return Outcome(operands=[*moved.operands, *[R] * (len(query.operands) - 1)], results=moved.results)


@rule("cirh.OneHot")
def one_hot(query: Query) -> Outcome:
    """Operands: indices, and constants, the last of which is the number of the new dimension."""
    constant = query.operands[4].owner
    assert isinstance(constant, Const)
    axis = int(constant.value.tensor()) % len(query.result_shape())
    return _moved(query, lambda dim: dim + (dim >= axis)) if query.sharded else query.replicated()


@rule("cirh.MatrixBandPart")
def band(query: Query) -> Outcome:
    last = len(query.shape(0)) - 2
    return _moved(query, lambda dim: None if dim >= last else dim)


@rule("cirh.pad", "cirh.unpad")
def pad(query: Query) -> Outcome:
    """Pads each dimension; the sharded one must not be padded."""
    if not query.placements[0].is_sharded:
        return query.replicated()
    amounts = [query.get(name) for name in _AMOUNTS if name in query.attributes]
    return _moved(query, lambda dim: None if any(amount[dim] for amount in amounts) else dim)

"""Sharding rules: operations that pick elements by index, or write to picked ones."""

from collections.abc import Sequence

from xdsl.ir import SSAValue

from appliance.compiler.sharding.rules.decompose_index import picks_own
from appliance.compiler.sharding.rules.reduction import along
from appliance.compiler.sharding.rules.rule import SUM, Decompose, Outcome, Placement, Query, R, Shape, rule
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr
from waferbox.cirh.dialect.operations import Const


@rule("aten.index_select")
def index_select(query: Query) -> Outcome:
    source, index = query.placements
    axis = query.axis(query.get("dim"))
    if source.is_sharded and source.dim == axis:
        raise query.mixes("picks from the dimension of the samples")
    if source.is_sharded:
        return Outcome(operands=[source, R], results=[source])
    if index.is_sharded:
        return Outcome(operands=[R, index], results=[index.at(axis)])
    return query.replicated()


@rule("aten.index_add")
def index_add(query: Query) -> Outcome:
    """Operands: self, index, source. Rows of source are added to the rows of self that the index names."""
    total, index, source = query.placements
    axis = query.axis(query.get("dim"))
    if not query.sharded:
        return query.replicated()
    if index.is_sharded or (source.is_sharded and source.dim == axis):
        # Each wafer adds its samples to zeros, which makes a partial sum. Other values would be added once by each.
        if total.is_sharded or not is_zero(query.operands[0]):
            raise query.mixes("adds samples to something else than zeros")
        cut = index if index.is_sharded else source.at(0)
        return Outcome(operands=[R, cut, cut.at(axis)], results=[SUM])
    cut = total if total.is_sharded else source
    if cut.dim == axis:
        if isinstance(query.operands[0].owner, Const):
            # As many rows as samples, by coincidence: the source is gathered, and each wafer makes all rows.
            return query.replicated()
        raise query.mixes("adds to the dimension of the samples")
    return Outcome(operands=[cut, R, cut], results=[cut])


def is_zero(value: SSAValue) -> bool:
    """Whether a value is a constant of zeros."""
    constant = value.owner.value if isinstance(value.owner, Const) else None
    return isinstance(constant, SplatAttr) and not bool(constant.scalar())


@rule("aten.gather")
def gather(query: Query) -> Outcome:
    if not query.sharded:
        return query.replicated()
    axis = query.axis(query.get("dim"))
    source, index = query.placements
    cut = source if source.is_sharded else index
    _check_same_size(query, cut.dim, axis)
    if cut.dim == axis:
        if source.is_sharded:
            raise query.mixes("picks from the dimension of the samples")
        return Outcome(operands=[R, index], results=[index])
    return Outcome(operands=[cut, cut], results=[cut])


@rule("aten.scatter.value", "aten.scatter.src", "aten.scatter_add", "aten.scatter_reduce.two", "cirh.Scatter")
def scatter(query: Query) -> Outcome:
    axis = query.axis(query.get("axis" if query.op.name == "cirh.Scatter" else "dim"))
    if query.sharded:
        _check_same_size(query, query.sharded[0].dim, axis)
    return along(query, axis)


def _check_same_size(query: Query, dim: int, axis: int) -> None:
    """Refuses an index with fewer rows than the tensor it picks from: its parts would not be of the same samples."""
    if dim != axis and len({query.shape(index)[dim] for index in range(len(query.operands))}) > 1:
        raise query.mixes("takes an index for a part of the samples")


@rule("aten.bucketize.Tensor")
def bucketize(query: Query) -> Outcome:
    """Operands: elements, and boundaries, which are the same for all samples."""
    elements, boundaries = query.placements
    if boundaries.is_sharded:
        raise query.mixes("takes samples for boundaries")
    return Outcome(operands=[elements, R], results=[elements]) if elements.is_sharded else query.replicated()


@rule("aten.searchsorted.Tensor")
def searchsorted(query: Query) -> Outcome:
    """Operands: a sorted row for each row of elements, or one for all; the elements; optionally the sorting order."""
    if not query.sharded:
        return query.replicated()
    cut = query.sharded[0]
    if len(query.shape(0)) == 1:
        if query.placements[0].is_sharded:
            raise query.mixes("searches among the samples")
        return Outcome(operands=[R, cut, *[R] * (len(query.operands) - 2)], results=[cut])
    return along(query, len(query.shape(0)) - 1)


@rule("aten.index.Tensor")
def index(query: Query) -> Outcome:
    """x[i, j, ...] with indices for the first dimensions: samples pick from a replicated tensor."""
    if not query.sharded:
        return query.replicated()
    source, *indices = query.placements
    if _picks_own(query, query.operands[1:], cut_indices=indices):
        raise Decompose
    if source.is_sharded:
        return _picked_in_each_sample(query)
    cut = next(placement for placement in indices if placement.is_sharded)
    _check_same_shapes(query, range(1, len(query.operands)))
    return Outcome(operands=[R, *[cut] * len(indices)], results=[cut])


def _picked_in_each_sample(query: Query) -> Outcome:
    """The sharded dimension is not indexed: the same positions are picked in each sample."""
    source, *indices = query.placements
    count = len(indices)
    if source.dim < count or any(placement.is_sharded for placement in indices):
        raise query.mixes("picks from the dimension of the samples")
    rank = len(query.result_shape()) - (len(query.shape(0)) - count)
    return Outcome(operands=[source, *[R] * count], results=[source.at(source.dim - count + rank)])


def _picks_own(query: Query, indices: Sequence[SSAValue], cut_indices: Sequence[Placement]) -> bool:
    """Whether each sample picks among its own elements: see `decompose_index.py`."""
    if query.num_parts == 1 or cut_indices[0].is_sharded or not query.shape(0):
        return False
    return query.sharded[0].dim == 0 and picks_own(query.shape(0)[0], indices)


def _picked_shape(query: Query) -> Shape:
    """The shape of the values of an index_put with two indices, if they are not repeated."""
    return (*query.shape(2), *query.shape(0)[2:])


@rule("aten.index_put")
def index_put(query: Query) -> Outcome:
    """Operands: self, indices, values. If self is zero, the samples of each wafer make a partial sum."""
    if not query.sharded:
        return query.replicated()
    total, *indices, values = query.placements
    own = query.get("accumulate", False) and types.shape(query.operands[-1]) == _picked_shape(query)
    if own and _picks_own(query, query.operands[1:-1], cut_indices=indices):
        raise Decompose
    last = len(query.operands) - 1
    cut = next((placement for placement in indices if placement.is_sharded), values)
    rank = max(len(query.shape(operand)) for operand in range(1, last))
    if not any(placement.is_sharded for placement in indices) and (total.is_sharded or cut.dim >= rank):
        return _put_in_each_sample(query, rank)
    if total.is_sharded or not is_zero(query.operands[0]) or not query.get("accumulate", False) or cut.dim >= rank:
        raise query.mixes("writes samples to a tensor that all of them have")
    _check_same_shapes(query, range(1, last))
    if query.shape(last)[:rank] != query.shape(1):
        raise query.mixes("writes values that are repeated")
    return Outcome(operands=[R, *[cut] * len(indices), cut], results=[SUM])


def _put_in_each_sample(query: Query, rank: int) -> Outcome:
    """The sharded dimension is not indexed: each sample writes to the same positions. rank: of the indices."""
    total, *indices, values = query.placements
    count = len(indices)
    cut = total if total.is_sharded else values.at(values.dim - rank + count)
    dim = cut.dim - count + rank
    if cut.dim < count:
        raise query.mixes("writes to the dimension of the samples")
    if query.shape(len(query.operands) - 1)[dim:] != query.shape(0)[cut.dim :]:
        raise query.mixes("writes values that are repeated")
    return Outcome(operands=[cut, *[R] * count, cut.at(dim)], results=[cut])


def _check_same_shapes(query: Query, operands: range) -> None:
    if len({query.shape(operand) for operand in operands}) > 1:
        raise query.mixes("takes indices of different shapes")

"""Sharding rules: operations that move, repeat, split and join elements."""

import math
from collections.abc import Callable

from appliance.compiler.passes.canonicalise import permutation_of
from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, Shape, rule, sharded


def move(query: Query, new_dim: Callable[[int], int | None]) -> Outcome:
    """The outcome for one operand whose dimensions move.

    new_dim: from a dimension of the operand to that of the result; None if the operation acts on it.
    """
    placement = query.placements[0]
    if not placement.is_sharded:
        # Moving elements is linear, so partial sums pass. Partial maxima would too, but no step needs it.
        passes = placement if placement == SUM else R
        return Outcome(operands=[passes], results=[passes] * len(query.op.results))
    dim = new_dim(placement.dim)
    if dim is None:
        raise query.mixes(f"acts on the dimension of the samples ({placement})")
    return Outcome(operands=[placement], results=[placement.at(dim)] * len(query.op.results))


@rule("cirh.Transpose")
def transpose(query: Query) -> Outcome:
    moved = move(Query(query.op, query.placements[:1], query.num_parts), permutation_of(query.op).index)
    return Outcome(operands=[*moved.operands, R], results=moved.results)


def reshaped_dim(placement: Placement, old: Shape, new: Shape, num_parts: int) -> Placement | None:
    """The placement of a reshaped value; None if the reshape mixes parts.

    Written as one product of factors, the index space of the old shape has the divided factor at a certain position:
    behind prod(old[:dim]) * outer. A dimension of the new shape must contain that position, behind a whole number of
    its blocks, and be divisible there.
    """
    if 0 in new:
        # A tensor without elements may be sharded in any dimension; the same size is kept if possible.
        fits_all = [dim for dim, size in enumerate(new) if size % (placement.outer * num_parts) == 0]
        same = [dim for dim in fits_all if new[dim] == old[placement.dim]]
        return placement.at((same or fits_all)[0])
    position = math.prod(old[: placement.dim]) * placement.outer
    begin = 1
    for dim, size in enumerate(new):
        if position % begin == 0:
            outer = position // begin
            fits = size % outer == 0 and (size // outer) % num_parts == 0
            # Several dimensions contain the position if some have size 1: the one with elements behind it is taken.
            if fits and (size // outer > 1 or dim == len(new) - 1):
                return sharded(dim, outer)
        begin *= size
    return None


@rule("cirh.Reshape")
def reshape(query: Query) -> Outcome:
    placement = query.placements[0]
    if not placement.is_sharded:
        return move(query, lambda dim: dim)
    moved = reshaped_dim(placement, query.shape(0), query.result_shape(), query.num_parts)
    if moved is None:
        old, new = list(query.shape(0)), list(query.result_shape())
        raise query.mixes(f"from {old} to {new} cuts through the samples ({placement})")
    return Outcome(operands=[placement], results=[moved])


@rule("cirh.BroadcastInDim")
def broadcast(query: Query) -> Outcome:
    dimensions = query.get("broadcast_dimensions")
    return move(query, lambda dim: int(dimensions[dim]))


@rule("cirh.Concat")
def concat(query: Query) -> Outcome:
    axis = query.axis(query.get("axis", 0))
    if not query.sharded:
        if all(placement == SUM for placement in query.placements):
            return Outcome(operands=list(query.placements), results=[SUM])
        return query.replicated()
    cuts = set(query.placements)
    first = query.sharded[0]
    if first.dim != axis:
        return Outcome(operands=[first] * len(query.placements), results=[first])
    sizes = {query.shape(index)[axis] for index in range(len(query.operands))}
    if len(cuts) > 1 or len(sizes) > 1:
        raise query.mixes("joins samples with something else along their dimension")
    # Each operand has `outer` blocks; they lie one after the other in the result.
    return Outcome(
        operands=[first] * len(query.placements), results=[sharded(axis, first.outer * len(query.placements))]
    )


def _keeps_axis(query: Query, axis: int, removed: bool) -> Outcome:
    """The outcome of an operation along one dimension, which may be removed; the sharded one must be another."""
    return move(query, lambda dim: None if dim == axis else dim - (removed and dim > axis))


@rule("aten.stack")
def stack(query: Query) -> Outcome:
    rank = len(query.result_shape())
    axis = int(query.get("dim", 0)) % rank
    if not query.sharded:
        if all(placement == SUM for placement in query.placements):
            return Outcome(operands=list(query.placements), results=[SUM])
        return query.replicated()
    cut = query.sharded[0]
    return Outcome(operands=[cut] * len(query.placements), results=[cut.at(cut.dim + (cut.dim >= axis))])


@rule("cirh.Split")
def split(query: Query) -> Outcome:
    return _keeps_axis(query, query.axis(query.get("axis")), removed=False)


@rule("aten.select.int")
def select(query: Query) -> Outcome:
    return _keeps_axis(query, query.axis(query.get("dim")), removed=True)


@rule("aten.unbind.int")
def unbind(query: Query) -> Outcome:
    return _keeps_axis(query, query.axis(query.get("dim", 0)), removed=True)


@rule("aten.slice.Tensor")
def slice_(query: Query) -> Outcome:
    axis = query.axis(query.get("dim", 0))
    placement = query.placements[0]
    if placement.is_sharded and placement.dim == axis:
        # A slice of whole blocks undoes a Concat.
        block = query.shape(0)[axis] // placement.outer
        start, end = query.get("start") or 0, query.get("end")
        size = query.result_shape()[axis]
        if query.get("step", 1) == 1 and start % block == 0 and size % block == 0 and end == start + size > start:
            local = {"start": start // query.num_parts, "end": end // query.num_parts}
            return Outcome(operands=[placement], results=[sharded(axis, size // block)], attributes=local)
    return _keeps_axis(query, axis, removed=False)


def _local_sizes(query: Query, outcome: Outcome, attribute: str) -> Outcome:
    """Adds an attribute that holds the result's sizes, with the sizes of a part."""
    local = outcome.results[0].local_shape(query.result_shape(), query.num_parts)
    return Outcome(operands=outcome.operands, results=outcome.results, attributes={attribute: list(local)})


@rule("aten.select_backward")
def select_backward(query: Query) -> Outcome:
    rank = len(query.result_shape())
    axis = int(query.get("dim")) % rank
    return _local_sizes(query, move(query, lambda dim: dim + (dim >= axis)), "input_sizes")


@rule("aten.slice_backward")
def slice_backward(query: Query) -> Outcome:
    axis = int(query.get("dim")) % len(query.result_shape())
    return _local_sizes(query, move(query, lambda dim: None if dim == axis else dim), "input_sizes")


@rule("aten.tril", "aten.triu")
def triangle(query: Query) -> Outcome:
    last = len(query.shape(0)) - 2
    return move(query, lambda dim: None if dim >= last else dim)


@rule("aten.diagonal")
def diagonal(query: Query) -> Outcome:
    """Two dimensions are removed; the elements of their diagonal become a new last dimension."""
    first, second = (query.axis(query.get(name, default)) for name, default in (("dim1", 0), ("dim2", 1)))
    gone = {first, second}
    return move(query, lambda dim: None if dim in gone else dim - sum(other < dim for other in gone))


@rule("aten.flip")
def flip(query: Query) -> Outcome:
    flipped = {query.axis(dim) for dim in query.get("dims")}
    return move(query, lambda dim: None if dim in flipped else dim)


@rule("aten.slice_scatter", "aten.select_scatter")
def scatter_of_a_part(query: Query) -> Outcome:
    """Operands: self, source. A part of one dimension is replaced; select_scatter's source lacks that dimension."""
    if not query.sharded:
        return query.replicated()
    axis = query.axis(query.get("dim", 0))
    removed = query.op.name == "aten.select_scatter"
    whole, source = query.placements
    cut = whole if whole.is_sharded else source.at(source.dim + (removed and source.dim >= axis))
    if cut.dim == axis:
        raise query.mixes(f"acts on the dimension of the samples ({cut})")
    return Outcome(operands=[cut, cut.at(cut.dim - (removed and cut.dim > axis))], results=[cut])


@rule("aten.roll")
def roll(query: Query) -> Outcome:
    rolled = {query.axis(dim) for dim in query.get("dims") or range(len(query.shape(0)))}
    return move(query, lambda dim: None if dim in rolled else dim)


@rule("aten.repeat", "cirh.Repeat")
def repeat(query: Query) -> Outcome:
    """Dimensions are aligned at the right. Repeating the sharded dimension n times gives n times as many blocks."""
    repeats = query.get("repeats")
    new = len(repeats) - len(query.shape(0))
    moved = move(query, lambda dim: dim + new)
    placement = moved.results[0]
    if not placement.is_sharded:
        return moved
    blocks = placement.outer * int(repeats[placement.dim])
    return Outcome(operands=moved.operands, results=[sharded(placement.dim, blocks)])


@rule("aten.constant_pad_nd")
def pad(query: Query) -> Outcome:
    """Pads each dimension by two numbers, the last dimension first."""
    placement = query.placements[0]
    if not placement.is_sharded:
        return query.replicated()
    amounts = query.get("pad")
    behind = 2 * (len(query.shape(0)) - 1 - placement.dim)
    if any(amounts[behind : behind + 2]):
        raise query.mixes("adds to the dimension of the samples")
    return Outcome(operands=[placement], results=[placement])

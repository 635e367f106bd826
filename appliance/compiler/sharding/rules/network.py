"""Sharding rules: products, losses, embeddings, layer norm."""

from appliance.compiler.core.rewriter import MEAN, NONE
from appliance.compiler.sharding.rules.rule import SUM, Decompose, Outcome, Placement, Query, R, rule
from waferbox.cirh.dialect.attributes import AttrValue


def product(query: Query, left: Placement, right: Placement, contracted: tuple[int, int], rows: int) -> Outcome:
    """The outcome of a product of two tensors of equal rank.

    Args:
        query: the product.
        left: placement of the left operand.
        right: placement of the right operand.
        contracted: the dimension of each that is summed over.
        rows: the dimension of the left operand that becomes the result's last but one.
    """
    summed = left.is_sharded and left.dim == contracted[0], right.is_sharded and right.dim == contracted[1]
    over_samples = any(summed)
    if left.is_sharded and right.is_sharded and not all(summed):
        # All samples by all samples: each wafer makes the rows or columns of its own samples.
        left, right = (R, right) if summed[0] else (left, R)
        over_samples = False
    if not left.is_sharded and not right.is_sharded:
        if (left == SUM and right == R) or (left == R and right == SUM):
            return Outcome(operands=[left, right], results=[SUM])
        return Outcome(operands=[R, R], results=[R])
    if over_samples:
        cut = left if left.is_sharded else right
        needs = [cut.at(contracted[0]), cut.at(contracted[1])]
        if any(have.is_sharded and have != want for have, want in zip((left, right), needs, strict=True)):
            raise query.mixes(f"multiplies operands that are cut differently ({left} and {right})")
        return Outcome(operands=needs, results=[SUM])
    rank = len(query.result_shape())
    if left.is_sharded:
        return Outcome(operands=[left, R], results=[left.at(rank - 2 if left.dim == rows else left.dim)])
    columns = rank - 1 if right.dim == (2 * rank - 3 - contracted[1]) else right.dim
    return Outcome(operands=[R, right], results=[right.at(columns)])


@rule("cirh.MatMul")
def matmul(query: Query) -> Outcome:
    left, right = query.placements
    transposed = bool(query.get("transpose_a", False)), bool(query.get("transpose_b", False))
    contracted = (0 if transposed[0] else 1, 1 if transposed[1] else 0)
    return product(query, left, right, contracted, 1 - contracted[0])


@rule("aten.mm")
def mm(query: Query) -> Outcome:
    left, right = query.placements
    return product(query, left, right, (1, 0), 0)


@rule("aten.bmm")
def bmm(query: Query) -> Outcome:
    left, right = query.placements
    batch = next((p for p in (left, right) if p.is_sharded and p.dim == 0), None)
    if batch is not None:
        if any(p.is_sharded and p != batch for p in (left, right)):
            raise query.mixes(f"multiplies operands that are cut differently ({left} and {right})")
        return Outcome(operands=[batch, batch], results=[batch])
    return product(query, left, right, (2, 1), 1)


@rule("aten.baddbmm")
def baddbmm(query: Query) -> Outcome:
    """The added tensor is aligned at the right, and may be broadcast."""
    _, left, right = query.placements
    inner = bmm(Query(query.op, [left, right], query.num_parts))
    (result,) = inner.results
    if not result.is_sharded:
        if query.sharded:
            raise query.mixes("adds to a product over the samples")
        return query.replicated()
    shape = query.shape(0)
    dim = result.dim - (3 - len(shape))
    cut = dim >= 0 and shape[dim] > 1
    return Outcome(operands=[result.at(dim) if cut else R, *inner.operands], results=[result])


@rule("aten.mv")
def mv(query: Query) -> Outcome:
    """Operands: matrix, vector."""
    matrix, vector = query.placements
    if matrix.is_sharded and matrix.dim == 0:
        return Outcome(operands=[matrix, R], results=[matrix])
    if query.sharded:
        cut = matrix if matrix.is_sharded else vector
        return Outcome(operands=[cut.at(1), cut.at(0)], results=[SUM])
    return query.replicated()


@rule("aten.dot")
def dot(query: Query) -> Outcome:
    if query.sharded:
        return Outcome(operands=[query.sharded[0]] * 2, results=[SUM])
    return query.replicated()


@rule("aten.addmm")
def addmm(query: Query) -> Outcome:
    bias, left, right = query.placements
    inner = product(query, left, right, (1, 0), 0)
    (result,) = inner.results
    if result.is_partial or bias.is_partial:
        raise Decompose
    if not result.is_sharded:
        return query.replicated()
    # The bias is aligned at the right.
    dim = result.dim - (2 - len(query.shape(0)))
    cut = dim >= 0 and query.shape(0)[dim] > 1
    return Outcome(operands=[result.at(dim) if cut else R, *inner.operands], results=[result])


@rule("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(query: Query) -> Outcome:
    if not query.sharded:
        return query.replicated()
    reduction = query.get("reduction")
    cut = query.sharded[0]
    if cut.dim != 0 or len(query.shape(0)) == 1:
        return query.replicated()
    if reduction == MEAN and query.num_parts > 1:
        raise Decompose
    needs = [cut, cut, *[R] * (len(query.placements) - 2)]
    return Outcome(operands=needs, results=[cut if reduction == NONE else SUM, SUM])


@rule("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(query: Query) -> Outcome:
    """Operands: grad_output, scores, labels, [class weights], total_weight, which is that of the whole batch."""
    cut = next((placement for placement in query.placements[1:3] if placement.is_sharded), None)
    if cut is None:
        return query.replicated()
    if cut.dim != 0 or len(query.shape(1)) == 1:
        return query.replicated()
    # Only a mean divides by the total weight. Otherwise the wafers must not wait for its reduction.
    total = R if query.get("reduction", MEAN) == MEAN else query.placements[-1]
    weights = [R] * (len(query.placements) - 4)
    return Outcome(operands=[cut if query.shape(0) else R, cut, cut, *weights, total], results=[cut])


@rule("cirh.SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(query: Query) -> Outcome:
    if not query.sharded:
        return query.replicated()
    cut = query.sharded[0]
    if cut.dim != 0:
        return query.replicated()
    return Outcome(operands=[cut, cut], results=[cut, cut])


@rule(
    "aten.mse_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
)
def elementwise_loss(query: Query) -> Outcome:
    if not query.sharded:
        return query.replicated()
    cut = query.sharded[0]
    reduction = query.get("reduction", MEAN)
    if query.shape(0) != query.shape(1):
        raise query.mixes("takes an input and a target of different shapes")
    if reduction == MEAN and query.num_parts > 1:
        raise Decompose
    needs = [_aligned(query, index, cut) for index in range(len(query.operands))]
    return Outcome(operands=needs, results=[cut if reduction == NONE else SUM])


@rule(
    "aten.mse_loss_backward",
    "aten.smooth_l1_loss_backward",
    "aten.huber_loss_backward",
    "aten.binary_cross_entropy_backward",
)
def elementwise_loss_backward(query: Query) -> Outcome:
    """Operands: grad_output, then those of the loss."""
    cut = next((placement for placement in query.placements[1:] if placement.is_sharded), None)
    if cut is None:
        return query.replicated()
    if query.shape(1) != query.shape(2):
        raise query.mixes("takes an input and a target of different shapes")
    # With a mean, a wafer would divide by its own number of elements.
    if query.get("reduction", MEAN) == MEAN and query.num_parts > 1:
        raise Decompose
    needs = [_aligned(query, index, cut) for index in range(len(query.operands))]
    return Outcome(operands=needs, results=[cut])


def _aligned(query: Query, operand: int, cut: Placement) -> Placement:
    """The placement of an operand that may be broadcast: it may have fewer dimensions, or dimensions of size 1."""
    shape = query.shape(operand)
    dim = cut.dim - (len(query.shape(1)) - len(shape))
    return cut.at(dim) if dim >= 0 and shape[dim] > 1 else R


@rule("aten.embedding")
def embedding(query: Query) -> Outcome:
    """Operands: weight, indices."""
    index = query.placements[1]
    if not index.is_sharded:
        return query.replicated()
    return Outcome(operands=[R, index], results=[index])


@rule("aten.embedding_dense_backward")
def embedding_backward(query: Query) -> Outcome:
    """Operands: grad_output, indices."""
    gradient, index = query.placements
    if index.is_sharded or gradient.is_sharded:
        cut = index if index.is_sharded else gradient
        if query.get("scale_grad_by_freq", False):
            raise query.mixes("counts the samples in which an index is (scale_grad_by_freq)")
        if cut.dim >= len(query.shape(1)):
            raise query.mixes("takes gradients whose features are cut")
        return Outcome(operands=[cut, cut], results=[SUM])
    if gradient == SUM and index == R:
        return Outcome(operands=[SUM, R], results=[SUM])
    return query.replicated()


@rule("aten.native_layer_norm")
def layer_norm(query: Query) -> Outcome:
    data = query.placements[0]
    if not data.is_sharded:
        return query.replicated()
    normalised: AttrValue = query.get("normalized_shape")
    assert isinstance(normalised, (list, tuple))
    if data.dim >= len(query.shape(0)) - len(normalised):
        raise Decompose
    return Outcome(operands=[data, *[R] * (len(query.operands) - 1)], results=[data, data, data])


@rule("aten.native_layer_norm_backward")
def layer_norm_backward(query: Query) -> Outcome:
    """Operands: grad_output, input, mean, rstd, then weight and bias."""
    cut = next((placement for placement in query.placements[:2] if placement.is_sharded), None)
    if cut is None:
        return query.replicated()
    if cut.dim >= len(query.shape(1)) - len(query.get("normalized_shape")):
        raise query.mixes("normalises over the samples")
    # A gradient that is not in the output mask is an empty tensor.
    asked = query.get("output_mask")
    results = [made if wanted else R for made, wanted in zip((cut, SUM, SUM), asked, strict=True)]
    return Outcome(operands=[cut] * 4 + [R] * (len(query.operands) - 4), results=results)

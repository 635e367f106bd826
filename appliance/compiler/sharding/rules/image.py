"""Sharding rules: convolutions, pooling, resizing and padding. They do not mix samples."""

from collections.abc import Sequence

from appliance.compiler.sharding.rules.rule import SUM, Outcome, Placement, Query, R, Rule, rule


@rule("aten.convolution")
def convolution(query: Query) -> Outcome:
    """Operands: input, weight, [bias]. Also transposed and grouped convolutions."""
    if not query.sharded:
        return query.replicated()
    cut = _samples(query, query.placements[:1])
    return Outcome(operands=[cut, *[R] * (len(query.operands) - 1)], results=[cut])


@rule("aten.convolution_backward")
def convolution_backward(query: Query) -> Outcome:
    """Operands: grad_output, input, weight. Results: the gradients of input, weight and bias."""
    if not query.sharded:
        return query.replicated()
    cut = _samples(query, query.placements[:2])
    return Outcome(operands=[cut, cut, R], results=[cut, SUM, SUM])


@rule("cirh.Convolution")
def convolution_of_one_pass(query: Query) -> Outcome:
    """Operands: image or gradient, and kernel; for the gradient of the kernel: image and gradient."""
    if not query.sharded:
        return query.replicated()
    if query.get("conv_pass_direction") == "BWD_KERNEL":
        cut = _samples(query, query.placements)
        return Outcome(operands=[cut, cut], results=[SUM])
    cut = _samples(query, query.placements[:1])
    return Outcome(operands=[cut, R], results=[cut])


@rule("cirh.BiasAdd")
def bias_add(query: Query) -> Outcome:
    """Operands: value, and a bias with a number for each element of one dimension."""
    value, bias = query.placements
    dim = query.axis(query.get("dim"))
    if not query.sharded:
        return query.replicated()
    cut = value if value.is_sharded else bias.at(dim)
    return Outcome(operands=[cut, cut.at(0) if cut.dim == dim else R], results=[cut])


@rule("cirh.BiasAddGrad")
def bias_add_grad(query: Query) -> Outcome:
    (cut,) = query.placements
    if not cut.is_sharded:
        return Outcome(operands=[cut], results=[cut]) if cut == SUM else query.replicated()
    return Outcome(operands=[cut], results=[cut.at(0) if cut.dim == query.axis(query.get("dim")) else SUM])


@rule("cirh.Pool")
def pool(query: Query) -> Outcome:
    """Windows lie within the last dimensions, after samples and channels."""
    return _within_planes(len(query.shape(0)) - 2)(query)


# The rank of an operand that is a single image, for operations that accept one.
_ONE_IMAGE = {"aten.im2col": 3, "aten.col2im": 2}


@rule(
    "aten.im2col",
    "aten.col2im",
    "aten.grid_sampler_2d",
    "aten.grid_sampler_2d_backward",
    "aten.grid_sampler_3d",
    "aten.grid_sampler_3d_backward",
)
def sample_by_sample(query: Query) -> Outcome:
    """All operands and results have the batch in dimension 0."""
    if not query.sharded:
        return query.replicated()
    if len(query.shape(0)) == _ONE_IMAGE.get(query.op.name):
        raise query.mixes("takes one image, whose first dimension is not that of the samples")
    cut = _samples(query, query.placements)
    return Outcome(operands=[cut] * len(query.operands), results=[cut] * len(query.op.results))


def _samples(query: Query, placements: Sequence[Placement]) -> Placement:
    """The placement of the operands that have the batch in dimension 0."""
    cut = next((placement for placement in placements if placement.is_sharded), None)
    if cut is None or cut.dim != 0:
        raise query.mixes(f"takes samples elsewhere than in dimension 0 of its input ({query.sharded[0]})")
    return cut


def _within_planes(spatial: int) -> Rule:
    """A rule for operations on each plane (the last dimensions) by itself: any other dimension may be sharded."""

    def within_planes(query: Query) -> Outcome:
        if not query.sharded:
            return query.replicated()
        cut = query.sharded[0]
        if cut.dim >= len(query.shape(0)) - spatial:
            raise query.mixes(f"acts on the dimension of the samples ({cut})")
        # The gradient of resizing has the size of the resized tensor as an attribute, including the batch.
        sizes = {"input_size": list(cut.local_shape(query.result_shape(), query.num_parts))}
        return Outcome(
            operands=[cut] * len(query.operands),
            results=[cut] * len(query.op.results),
            attributes=sizes if "input_size" in query.attributes else {},
        )

    return within_planes


_WITHIN_PLANES = {
    1: """
        upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d reflection_pad1d replication_pad1d
    """,
    2: """
        max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
        upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d
    """,
    3: """
        max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d
        upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d replication_pad3d
    """,
}
for _spatial, _names in _WITHIN_PLANES.items():
    for _name in _names.split():
        rule(f"aten.{_name}", f"aten.{_name}_backward")(_within_planes(_spatial))

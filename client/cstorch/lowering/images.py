"""Rules for operations of image models that are neither pointwise nor taken as they are."""

from torch import fx
from xdsl.ir import SSAValue

from cirh.dialect import types
from cirh.table.lookup import spec
from cstorch.lowering.context import Lowering, Result, arguments_of, shape_of
from cstorch.lowering.verbatim import verbatim


def batch_norm_inference(lowering: Lowering, node: fx.Node) -> Result:
    """Only the normalised input: the statistics that the operation also returns are empty on a CPU, not on meta."""
    results = verbatim(lowering, node, spec("aten._native_batch_norm_legit_no_training"))
    assert isinstance(results, tuple)
    return results[:1]


def pixel_shuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """Channels (c, factor, factor) become rows (h, factor) and columns (w, factor)."""
    value, factor = lowering.value(node.args[0]), arguments_of(node)["upscale_factor"]
    *batch, channels, height, width = types.shape(value)
    apart = lowering.reshape(value, [*batch, channels // factor**2, factor, factor, height, width])
    return lowering.reshape(lowering.transpose(apart, _tail(len(batch), 0, 3, 1, 4, 2)), shape_of(node))


def pixel_unshuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """The inverse of pixel_shuffle."""
    value, factor = lowering.value(node.args[0]), arguments_of(node)["downscale_factor"]
    *batch, channels, height, width = types.shape(value)
    apart = lowering.reshape(value, [*batch, channels, height // factor, factor, width // factor, factor])
    return lowering.reshape(lowering.transpose(apart, _tail(len(batch), 0, 2, 4, 1, 3)), shape_of(node))


def channel_shuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """Channels (groups, c) become (c, groups)."""
    value, groups = lowering.value(node.args[0]), arguments_of(node)["groups"]
    samples, channels, *image = types.shape(value)
    apart = lowering.reshape(value, [samples, groups, channels // groups, *image])
    order = [0, 2, 1, *range(3, 3 + len(image))]
    return lowering.reshape(lowering.transpose(apart, order), shape_of(node))


def _tail(batch: int, *order: int) -> list[int]:
    """A permutation of the dimensions behind the first ones."""
    return [*range(batch), *(batch + dim for dim in order)]

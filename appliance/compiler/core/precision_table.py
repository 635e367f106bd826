"""Which operations of the wafers compute in half precision, at each precision optimisation level.

What is given: with mixed precision, products, convolutions and attention are in half; exponentials, logarithms,
powers, norms, sums, softmax and losses in float32; layer norm and embedding compute in float32 and give halves; what
has several operands goes by the widest; level 1 is the default (the API's documentation, by its cast lists). What the
levels are exactly it does not say. And training has to err no more than under torch's own autocast, which the lists do
not: halves of layer norms and embeddings make the whole residual stream of a transformer half. Our choice:

0  As torch's autocast, and besides all norms give float32.
1  As torch's autocast: layer norm and embedding give float32, so that the residual stream stays float32. (Halves of an
   embedding's weights alone, widened again, were too much: T5 and BERT erred 1.3 times as much in their losses.) Batch
   and group norm compute in float32 and give halves: on several wafers the parts of a batch norm are sums. All
   gradients of norms and of embeddings compute in float32: torch's kernels for halves add up those of the parameters in
   half, which is wrong by 3 % after a thousand rows.
2  The lists above: layer norm and embedding give halves. Softmax and exponentials are in half too, where torch's
   kernels for halves compute in float32 inside; one operand in half is enough for the rest, and constants are rounded.
   Sums, losses and logarithms stay float32.

At every level: an operation that this table does not know computes in float32, and so does what is done with partial
values, the sums over samples that become gradients.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from waferbox.cirh.table.lookup import spec

LEVELS: Final = (0, 1, 2)
DEFAULT_LEVEL: Final = 1


class Compute(Enum):
    """How an operation computes."""

    HALF = "operands and results in half"
    FLOAT = "operands and results in float32"
    ROUNDED = "operands in float32, the first result rounded to half"
    WIDEST = "in half if all operands are; numbers and tensors of rank 0 do not count"
    NARROWEST = "in half if one operand is"


_PRODUCTS = """
    cirh.MatMul cirh.DotGeneral aten.mm aten.bmm aten.addmm aten.baddbmm aten.mv aten.addmv aten.dot
    cirh.Convolution aten.convolution aten.convolution_backward cirh.Attention cirh.AttentionGrad
"""
# Results of operations in half that are float32 all the same, and are read so by their gradients.
STATISTICS: Final[Mapping[str, int]] = {"cirh.Attention": 1}
_EMBEDDING = "aten.embedding"
_LAYER_NORMS = "aten.native_layer_norm aten.native_layer_norm_backward cirh.LayerNorm cirh.LayerNormGrad"
_BATCH_NORMS = """
    aten._native_batch_norm_legit_functional aten._native_batch_norm_legit.no_stats
    aten._native_batch_norm_legit_no_training aten.native_batch_norm_backward
    aten.native_group_norm aten.native_group_norm_backward
"""
_SOFTMAXES = "cirh.Softmax aten._softmax aten._softmax_backward_data"
# Of torch's list for autocast, what goes element by element; logarithms stay float32 at all levels.
_EXPONENTIALS = """
    cirh.Exp cirh.Pow cirh.Rsqrt cirh.Reciprocal aten.exp2 aten.expm1 aten.tan aten.sinh aten.cosh aten.asin aten.acos
"""
_FLOATS = """
    cirh.Log aten.log1p aten.log2 aten.log10 aten.softplus aten.softplus_backward
    aten.log_sigmoid_forward aten.log_sigmoid_backward
    aten.mse_loss aten.mse_loss_backward aten.smooth_l1_loss aten.smooth_l1_loss_backward
    aten.huber_loss aten.huber_loss_backward aten.binary_cross_entropy aten.binary_cross_entropy_backward
    aten.binary_cross_entropy_with_logits
"""
# Elements are moved or chosen. Those that go element by element are found by their row in CIRH's table.
_SHAPES = """
    cirh.Reshape cirh.Transpose cirh.BroadcastInDim cirh.Concat cirh.Split cirh.Gather cirh.Select aten.stack aten.cat
    aten.select.int aten.slice.Tensor aten.select_backward aten.slice_backward aten.select_scatter aten.slice_scatter
    aten.index_select aten.gather aten.index.Tensor aten.split.Tensor aten.split_with_sizes aten.unbind.int
    aten.flip aten.roll aten.repeat aten.tril aten.triu aten.constant_pad_nd aten.diagonal aten.amax aten.amin
    aten.masked_fill.Scalar aten.masked_fill.Tensor aten.where.ScalarSelf aten.where.ScalarOther aten.where.Scalar
    aten.max_pool2d_with_indices aten.max_pool3d_with_indices aten.adaptive_max_pool2d aten.adaptive_max_pool3d
    aten.im2col aten.reflection_pad1d aten.reflection_pad2d aten.replication_pad1d aten.replication_pad2d
    aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d
"""
_POOLS = """
    aten.max_pool2d_with_indices_backward aten.avg_pool2d aten.avg_pool2d_backward
    aten._adaptive_avg_pool2d aten._adaptive_avg_pool2d_backward
"""
# Their results are elements of their operands, or zero: they need no rounding.
EXACT: Final = frozenset(_SHAPES.split())


def _rows(level: int) -> Mapping[str, Compute]:
    follow = Compute.NARROWEST if level == 2 else Compute.WIDEST
    rows = dict.fromkeys(_PRODUCTS.split(), Compute.HALF)
    rows[_EMBEDDING] = Compute.HALF if level == 2 else Compute.FLOAT
    rows |= dict.fromkeys(_LAYER_NORMS.split(), Compute.ROUNDED if level == 2 else Compute.FLOAT)
    rows |= dict.fromkeys(_BATCH_NORMS.split(), Compute.FLOAT if level == 0 else Compute.ROUNDED)
    rows |= dict.fromkeys([*_SOFTMAXES.split(), *_EXPONENTIALS.split()], follow if level == 2 else Compute.FLOAT)
    rows |= dict.fromkeys(_FLOATS.split(), Compute.FLOAT)
    rows |= dict.fromkeys([*_SHAPES.split(), *_POOLS.split()], follow)
    return rows


_ROWS: Final = tuple(_rows(level) for level in LEVELS)


def row_of(name: str, level: int) -> Compute:
    """How the operation of this name computes at a level."""
    row = _ROWS[level].get(name)
    if row is not None:
        return row
    if spec(name).pointwise:
        return Compute.NARROWEST if level == 2 else Compute.WIDEST
    return Compute.FLOAT


def reduction(kind: str, level: int) -> Compute:
    """How a cirh.Reduce of this kind computes: the largest of some values is one of them, a sum is not."""
    if kind == "ADD":
        return Compute.FLOAT
    return Compute.NARROWEST if level == 2 else Compute.WIDEST

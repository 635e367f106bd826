"""The operations of the wafers that compute in half precision, at each precision optimisation level.

The API's documentation gives cast lists. With mixed precision, products, convolutions and attention compute in half;
exponentials, logarithms, powers, norms, sums, softmax and losses in float32; layer norm and embedding compute in
float32 and return halves; operations with several operands use the widest type. Level 1 is the default. The
documentation does not define the levels. Training should err no more than under torch's autocast, which the lists do
not achieve: halves from layer norms and embeddings make the whole residual stream of a transformer half. Hence:

0  As torch's autocast; in addition, all norms return float32.
1  As torch's autocast: layer norm and embedding return float32, so that the residual stream stays float32. (With
   halves of an embedding's weights, widened again, the losses of T5 and BERT erred 1.3 times as much.) Batch and group
   norm compute in float32 and return halves: on several wafers the parts of a batch norm are sums. All gradients of
   norms and of embeddings compute in float32: torch's kernels for halves add the gradients of the parameters in half,
   which is wrong by 3 % after a thousand rows.
2  The cast lists: layer norm and embedding return halves. Softmax and exponentials compute in half, too; torch's
   kernels for halves compute in float32 inside. For other operations one operand in half is enough, and constants are
   rounded. Sums, losses and logarithms stay float32.

At every level, operations that are not in this table compute in float32, and so do operations on partial values, which
are the sums over samples that become gradients.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final

from waferbox.cirh.table.lookup import spec

LEVELS: Final = (0, 1, 2)
DEFAULT_LEVEL: Final = 1


class Compute(Enum):
    """The precision in which an operation computes."""

    HALF = "operands and results in half"
    FLOAT = "operands and results in float32"
    ROUNDED = "operands in float32, the first result rounded to half"
    WIDEST = "in half if all operands are; numbers and tensors of rank 0 do not count"
    NARROWEST = "in half if one operand is"


_PRODUCTS = """
    cirh.MatMul cirh.DotGeneral aten.mm aten.bmm aten.addmm aten.baddbmm aten.mv aten.addmv aten.dot
    cirh.Convolution aten.convolution aten.convolution_backward cirh.Attention cirh.AttentionGrad
    cirh.LinearCrossEntropy cirh.LinearCrossEntropyGrad
"""
# By operation in half, the results that stay float32.
FLOAT_RESULTS: Final[Mapping[str, Collection[int]]] = {"cirh.Attention": (1,), "cirh.LinearCrossEntropy": (0, 1, 2)}
# By operation in half, the operands that stay float32, beside results of other operations that do.
FLOAT_OPERANDS: Final[Mapping[str, Collection[int]]] = {"cirh.LinearCrossEntropyGrad": (0, 1, 2, 3)}
_EMBEDDING = "aten.embedding"
_LAYER_NORMS = "aten.native_layer_norm aten.native_layer_norm_backward cirh.LayerNorm cirh.LayerNormGrad"
_BATCH_NORMS = """
    aten._native_batch_norm_legit_functional aten._native_batch_norm_legit.no_stats
    aten._native_batch_norm_legit_no_training aten.native_batch_norm_backward
    aten.native_group_norm aten.native_group_norm_backward
"""
_SOFTMAXES = "cirh.Softmax aten._softmax aten._softmax_backward_data"
# The element-wise operations of torch's float32 list for autocast, without logarithms, which are float32 at all levels.
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
# Operations that move or choose elements. Element-wise operations are found by their row in CIRH's table.
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
# Operations whose results are elements of their operands, or zero, and so need no rounding.
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
    """The precision of an operation at a level."""
    row = _ROWS[level].get(name)
    if row is not None:
        return row
    if spec(name).pointwise:
        return Compute.NARROWEST if level == 2 else Compute.WIDEST
    return Compute.FLOAT


def reduction(kind: str, level: int) -> Compute:
    """The precision of a cirh.Reduce of a kind. A maximum of halves is a half; a sum has to be rounded."""
    if kind == "ADD":
        return Compute.FLOAT
    return Compute.NARROWEST if level == 2 else Compute.WIDEST

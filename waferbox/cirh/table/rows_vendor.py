"""The rows of the table for operations of the real dialect that only the vendor's own client writes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from waferbox.cirh import CirhError
from waferbox.cirh.calls.images import prepare_bias_add, prepare_bias_add_grad, prepare_convolution, prepare_pool
from waferbox.cirh.calls.norms import (
    group_norm_grad_types,
    prepare_batch_norm,
    prepare_batch_norm_grad,
    prepare_group_norm,
    prepare_group_norm_grad,
)
from waferbox.cirh.calls.picking import prepare_gather, prepare_gather_nd, prepare_scatter, prepare_topk
from waferbox.cirh.calls.products import in_float32
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.calls.slices import (
    prepare_matrix_band_part,
    prepare_one_hot,
    prepare_pad,
    prepare_repeat,
    prepare_running,
    prepare_slice,
    prepare_strided_slice,
    prepare_strided_slice_grad,
    prepare_unpad,
)
from waferbox.cirh.dialect.spec import Call, Format, OpSpec, Site, Typed
from waferbox.cirh.table import rules
from waferbox.cirh.table.row import add_row

aten = torch.ops.aten
ROWS: dict[str, OpSpec] = {}
row = partial(add_row, ROWS)

# Operations that only place or name a tensor. They change nothing, since the values of a module are whole tensors.
ANNOTATIONS: Final = {
    "AnnotateTensor": "tensor_annotation=STRING",
    "ConstrainValueLayout": "",
    "DeviceToDeviceTransfer": "dst_device=STRING dst_constraints=STRING?",
    "MeshAllGather": "gather_axes=INTS",
    "MeshAllSlice": "split_axes=INTS names=STRING",
    "MeshShard": "mesh_id=INT split_axes=INTS names=STRING partial_axes=INTS? partial_type=STRING? devices=STRING?",
    "MeshToMeshTransfer": "srcMeshId=INT dstMeshId=INT srcRootId=INT?",
    "RefillRecomputeConstraint": "",
    "ScopeBoundary": "boundary_type=STRING scope_name=STRING",
    "SerializeBarrier": "",
    "TagGradient": "shared_name=STRING",
}
# The rest of the dialect: operations of sparse, low-rank and mixture-of-experts kernels, fused optimizers, results
# whose size depends on their input, and operations whose meaning their names do not determine.
_REFUSED = """
    Adam Composite ConditionalArange DLowRankScan DMatMul ExpertParallelShuffle ExpertParallelShuffleKtoK
    ExpertParallelUnshuffle ExpertParallelUnshuffleKtoK Fscale FusedTopK FusedTopP FusedTopPDeinterleaved
    GlobalTensorToWaferShards GradientDescent InfSparseMatMul LowRankScan MultiboxSelectWeight MultiboxStoreWeight
    NonZero NthOrderStatistic RandomMultinomial RangedDMatMul RangedMatMul ReduceBias SparseActMatMul
    SparseActMatMulGrad SparseMatMul SparseMatMulGrad WaferShardsToGlobalTensor
"""
REFUSED: Final = frozenset(f"cirh.{name}" for name in _REFUSED.split())


def _annotation(site: Site) -> Call:
    if site.get("partial_axes") or site.get("partial_type"):
        raise CirhError(f"{site.name}: partial tensors are not executed")
    return Call(lambda *tensors: tensors)


def _operands(site: Site) -> rules.Types:
    return site.operands


def _first_operand(site: Site) -> rules.Types:
    return site.operands[:1]


def _extended(site: Site) -> Call:
    """Widens an integer by its sign (ExtSI), or by zeros (ExtUI), as if its bits were those of an unsigned integer."""
    source, dtype = site.operands[0].dtype, site.result.dtype
    signed = site.name == "cirh.ExtSI"
    integers = not source.is_floating_point and not dtype.is_floating_point and dtype is not torch.bool
    if not integers or dtype.itemsize < source.itemsize or (signed and source is torch.bool):
        raise CirhError(f"{site.name}: {source} cannot become {dtype}")
    if signed or source is torch.bool or source.itemsize == dtype.itemsize:
        return Call(lambda x: x.to(dtype))
    return Call(lambda x: x.to(dtype) & (1 << 8 * source.itemsize) - 1)


def _with(function: Callable[..., Any], *names: str, first: tuple[int, ...] = ()) -> Callable[[Site], Call]:
    """A function that prepares a call with the operands, in the order `first` if it is given, and these attributes."""

    def prepare(site: Site) -> Call:
        values = [site.get(name) for name in names]
        if first:
            return Call(lambda *tensors: function(*(tensors[index] for index in first), *values))
        return Call(lambda *tensors: function(*tensors, *values))

    return prepare


def _elu_grad(gradients: torch.Tensor, features: torch.Tensor, alpha: float) -> torch.Tensor:
    gradient: torch.Tensor = aten.elu_backward.default(gradients, alpha, 1, 1, False, features)
    return gradient


def _leaky_relu_grad(gradients: torch.Tensor, features: torch.Tensor, alpha: float) -> torch.Tensor:
    gradient: torch.Tensor = aten.leaky_relu_backward.default(gradients, features, alpha, False)
    return gradient


def _soft_cross_entropy(site: Site) -> Call:
    """Cross entropy with probabilities as labels. Results: the loss of each row, and its gradient."""
    features, labels = site.operands
    axis = axis_of(site, site.get("axis", len(features.shape) - 1), len(features.shape))
    if features != labels:
        raise CirhError(f"{site.name}: labels {labels} do not fit features {features}")

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probabilities = torch.log_softmax(logits, axis)
        return -(targets * log_probabilities).sum(axis), log_probabilities.exp() - targets

    return Call(cross_entropy)


for _name, _given in ANNOTATIONS.items():
    row(_name, "input*", _annotation, attributes=_given, results=None, rule=_operands)

row("SigmoidGrad", "y dy", _with(aten.sigmoid_backward.default, first=(1, 0)), format=Format.SAME, pointwise=True)
row("Elu", "features", _with(functional.elu, "alpha"), attributes="alpha=FLOAT", format=Format.SAME, pointwise=True)
row(
    "EluGrad",
    "gradients features",
    _with(_elu_grad, "alpha"),
    attributes="alpha=FLOAT",
    format=Format.SAME,
    pointwise=True,
)
row(
    "LeakyRelu",
    "features",
    _with(functional.leaky_relu, "alpha"),
    attributes="alpha=FLOAT",
    format=Format.SAME,
    pointwise=True,
)
row("LeakyReluGrad", "gradients features", _with(_leaky_relu_grad, "alpha"), attributes="alpha=FLOAT", pointwise=True)
row("HardSigmoid", "features", _with(functional.hardsigmoid), format=Format.SAME, pointwise=True)
row(
    "HardSigmoidGrad",
    "gradients features",
    _with(aten.hardsigmoid_backward.default),
    format=Format.SAME,
    pointwise=True,
)
row(
    "Softplus",
    "features",
    _with(functional.softplus, "beta", "threshold"),
    attributes="beta=FLOAT threshold=FLOAT",
    format=Format.SAME,
    pointwise=True,
)
for _name in ("ExtSI", "ExtUI"):
    row(_name, "x", _extended, format=Format.CAST, typed=Typed.REQUIRED, pointwise=True)

_CONVOLUTION = "conv_pass_direction=STRING data_format=STRING groups=INT dilation=INTS padding=INTS stride=INTS"
row(
    "Convolution",
    "input kernel",
    in_float32(prepare_convolution),
    attributes=f"{_CONVOLUTION} transposed=BOOL?",
    typed=Typed.REQUIRED,
    rule=rules.given,
)
row("BiasAdd", "value bias", prepare_bias_add, attributes="dim=INT", typed=Typed.REQUIRED, rule=rules.given)
row("BiasAddGrad", "out_backprop", prepare_bias_add_grad, attributes="dim=INT", typed=Typed.REQUIRED, rule=rules.given)
row(
    "Pool",
    "input delta",
    in_float32(prepare_pool),
    attributes="data_format=STRING dilation=INTS gradient=BOOL? ksize=INTS padding=INTS pool_type=STRING strides=INTS",
    format=Format.GENERIC,
    typed=Typed.REQUIRED,
    rule=rules.given,
)
_NORM = "data_format=STRING epsilon=FLOAT"
row(
    "FusedBatchNorm",
    "x scale offset mean variance",
    prepare_batch_norm,
    attributes=f"{_NORM} is_training=BOOL exponential_avg_factor=FLOAT?",
    results=3,
    typed=Typed.REQUIRED,
    rule=rules.given,
    result_names="y batch_mean batch_variance",
    unread=(1, 2),
)
row(
    "FusedBatchNormGrad",
    "y_backprop x scale",
    prepare_batch_norm_grad,
    attributes=f"{_NORM} is_training=BOOL",
    results=3,
    typed=Typed.REQUIRED,
    rule=rules.given,
    result_names="x_backprop scale_backprop offset_backprop",
)
_GROUPS = "data_format=STRING affine=BOOL? num_groups=INT"
row(
    "GroupNorm",
    "input gamma? beta?",
    prepare_group_norm,
    attributes=f"{_GROUPS} epsilon=FLOAT",
    rule=_first_operand,
)
row(
    "GroupNormGrad",
    "y_backprop x scale?",
    prepare_group_norm_grad,
    attributes=f"{_GROUPS} epsilon=FLOAT?",
    results=None,
    rule=group_norm_grad_types,
    result_names="x_backprop scale_backprop offset_backprop",
)
row(
    "SoftmaxCrossEntropyWithLogits",
    "features labels",
    _soft_cross_entropy,
    attributes="axis=INT?",
    results=2,
    result_names="loss backprop",
)
row(
    "Gather",
    "input indices",
    prepare_gather,
    attributes="axis=INT? batch_dims=INT? is_sparse=BOOL?",
    typed=Typed.OPTIONAL,
)
row("GatherNd", "input indices", prepare_gather_nd, attributes="sparse_grad=BOOL? start_dim=INT?")
row(
    "Scatter",
    "init indices updates",
    prepare_scatter,
    attributes="axis=INT reduce_kind=STRING",
    rule=_first_operand,
)
row(
    "TopK",
    "input",
    prepare_topk,
    attributes="dimension=INT k=INT largest=BOOL? sorted=BOOL?",
    results=2,
    typed=Typed.REQUIRED,
    rule=rules.given,
    result_names="topKValues topKIndices",
)
_RUNNING = "axis=INT exclusive=BOOL? reverse=BOOL?"
row("CumSum", "input", prepare_running(torch.cumsum, 0), attributes=_RUNNING, rule=_first_operand)
row("CumProd", "input", prepare_running(torch.cumprod, 1), attributes=_RUNNING, rule=_first_operand)
row(
    "pad",
    "operand",
    prepare_pad,
    attributes="constant_values=FLOATS? edge_padding_high=INTS edge_padding_low=INTS interior_padding=INTS"
    " padding_mode=STRING?",
)
row("unpad", "operand", prepare_unpad, attributes="edge_unpadding_high=INTS")
row("Slice", "input begin! size!", prepare_slice)
_STRIDES = "begin_mask=INT? ellipsis_mask=INT? end_mask=INT? new_axis_mask=INT? shrink_axis_mask=INT?"
row("StridedSlice", "input begin! end! strides!", prepare_strided_slice, attributes=_STRIDES)
row("StridedSliceGrad", "shape! begin! end! strides! dy", prepare_strided_slice_grad, attributes=_STRIDES)
row("Repeat", "input", prepare_repeat, attributes="repeats=INTS")
row("MatrixBandPart", "input num_lower! num_upper!", prepare_matrix_band_part, rule=_first_operand)
row("OneHot", "indices num_class! on_value! off_value! axis!", prepare_one_hot)

"""The rows of the table for the common operations of the real dialect, and for those that it lacks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.attention import attention_types, prepare_attention, prepare_attention_grad
from waferbox.cirh.calls.cbfloat16 import round_to_cbfloat16, round_to_cbfloat16_out
from waferbox.cirh.calls.linear_cross_entropy import (
    linear_cross_entropy_types,
    prepare_linear_cross_entropy,
    prepare_linear_cross_entropy_grad,
)
from waferbox.cirh.calls.mask_from_topk import mask_types, prepare_mask_from_topk
from waferbox.cirh.calls.network import (
    prepare_cross_entropy,
    prepare_l2_norm,
    prepare_layer_norm,
    prepare_layer_norm_grad,
    prepare_softmax,
)
from waferbox.cirh.calls.products import by_processor, in_float32, prepare_dot_general, prepare_matmul
from waferbox.cirh.calls.random_numbers import prepare_bernoulli, prepare_integer, prepare_normal, prepare_uniform
from waferbox.cirh.calls.shape import (
    prepare_arange,
    prepare_broadcast,
    prepare_concat,
    prepare_reduce,
    prepare_reshape,
    prepare_scatter_nd,
    prepare_split,
    prepare_transpose,
)
from waferbox.cirh.dialect.spec import Call, Format, OpSpec, Site, Typed
from waferbox.cirh.table import rules
from waferbox.cirh.table.row import add_row, always

aten = torch.ops.aten
ROWS: dict[str, OpSpec] = {}
row = partial(add_row, ROWS)


def _truncating_div(site: Site) -> Call:
    if site.operands[0].dtype.is_floating_point:
        return Call(torch.div, torch.div)
    return Call(*[partial(torch.div, rounding_mode="trunc")] * 2)


def _relu_grad_out(gradients: torch.Tensor, features: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return aten.threshold_backward.grad_input(gradients, features, 0, grad_input=out)


def _relu_grad(gradients: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return aten.threshold_backward.default(gradients, features, 0)


def _gelu_mode(site: Site) -> str:
    modes = {"NONE": "none", "TANH": "tanh"}
    mode = str(site.get("approximation", "NONE"))
    if mode not in modes:
        raise CirhError(f"{site.name}: approximation is NONE or TANH, not {mode!r}")
    return modes[mode]


def _gelu(site: Site) -> Call:
    mode = _gelu_mode(site)
    return Call(partial(aten.gelu.default, approximate=mode), partial(aten.gelu.out, approximate=mode))


def _gelu_grad(site: Site) -> Call:
    mode = _gelu_mode(site)
    return Call(partial(aten.gelu_backward.default, approximate=mode))


_COMPARISONS: Mapping[str, Callable[..., Any]] = {
    "EQ": torch.eq,
    "NE": torch.ne,
    "LT": torch.lt,
    "LE": torch.le,
    "GT": torch.gt,
    "GE": torch.ge,
}


def _compare(site: Site) -> Call:
    direction = str(site.get("comparison_direction"))
    function = _COMPARISONS.get(direction)
    if function is None:
        raise CirhError(f"{site.name}: comparison_direction is one of {', '.join(_COMPARISONS)}, not {direction!r}")
    return Call(function, function)


def _copy_out(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x)


def _cast(site: Site) -> Call:
    dtype = site.result.dtype
    return Call(lambda x: x.to(dtype), _copy_out)


def _round_cb16(site: Site) -> Call:
    if site.operands[0].dtype is not torch.float32:
        raise CirhError(f"{site.name}: rounds float32 tensors, not {site.operands[0].dtype}")
    return Call(round_to_cbfloat16, round_to_cbfloat16_out)


def _where_out(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.where(c, a, b, out=out)


for _name, _function in {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "Atan2": torch.atan2,
    "And": torch.bitwise_and,
    "Or": torch.bitwise_or,
    "Xor": torch.bitwise_xor,
}.items():
    row(_name, "x y", always(_function), format=Format.SAME, pointwise=True)
row("Div", "x y", _truncating_div, format=Format.SAME, pointwise=True)

for _name, _function in {
    "Tanh": torch.tanh,
    "Relu": torch.relu,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sigmoid": torch.sigmoid,
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Cos": torch.cos,
    "Sin": torch.sin,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Erf": torch.erf,
    "Reciprocal": torch.reciprocal,
    "Not": torch.bitwise_not,
}.items():
    _out = aten.relu.out if _name == "Relu" else None
    row(_name, "x", always(_function, _out), format=Format.SAME, pointwise=True)

row("Gelu", "x", _gelu, attributes="approximation=STRING?", format=Format.SAME, pointwise=True)
row("GeluGrad", "dx x", _gelu_grad, attributes="approximation=STRING?", format=Format.SAME, pointwise=True)
row("ReluGrad", "gradients features", always(_relu_grad, _relu_grad_out), format=Format.SAME, pointwise=True)
row("Cast", "x", _cast, attributes="Truncate=BOOL?", format=Format.CAST, typed=Typed.REQUIRED, pointwise=True)
# Not in the real dialect: see waferbox.cirh.calls.cbfloat16.
row("RoundCb16", "x", _round_cb16, format=Format.SAME, pointwise=True)
row("Compare", "x y", _compare, attributes="comparison_direction=STRING", format=Format.CAST, pointwise=True)
row("Select", "cond a b", always(torch.where, _where_out), pointwise=True)
row("Clamp", "x min max", always(torch.clamp), pointwise=True)
row("Softmax", "logits", prepare_softmax, rule=rules.softmax, attributes="axis=INT?", format=Format.SAME)
row(
    "MatMul",
    "a b",
    in_float32(by_processor(prepare_matmul)),
    rule=rules.matmul,
    attributes="transpose_a=BOOL? transpose_b=BOOL?",
)
row(
    "DotGeneral",
    "lhs rhs",
    in_float32(prepare_dot_general),
    attributes="lhs_batching_dimensions=INTS rhs_batching_dimensions=INTS"
    " lhs_contracting_dimensions=INTS rhs_contracting_dimensions=INTS",
)
row(
    "BroadcastInDim",
    "operand",
    prepare_broadcast,
    attributes="broadcast_dimensions=INTS",
    typed=Typed.REQUIRED,
    rule=rules.given,
)
row("Reshape", "input", prepare_reshape, typed=Typed.REQUIRED, rule=rules.given)
row("Transpose", "x perm!", prepare_transpose, rule=rules.transpose)
row(
    "Reduce",
    "input",
    prepare_reduce,
    attributes="dimensions=INTS keep_dims=INTS? reduce_kind=STRING",
    typed=Typed.OPTIONAL,
    rule=rules.reduce,
)
row("MaskFromTopK", "input k", prepare_mask_from_topk, attributes="dimension=INT", rule=mask_types)
row("Concat", "values*", prepare_concat, rule=rules.concat, attributes="axis=INT?")
row("Split", "input", prepare_split, rule=rules.split, attributes="split_sizes=INTS axis=INT", results=None)
row("ScatterNd", "init indices updates", prepare_scatter_nd)
row("Arange", "start! end! step!", prepare_arange, attributes="dim=INT?", typed=Typed.OPTIONAL, factory=True)
row(
    "SparseSoftmaxCrossEntropyWithLogits",
    "features sparse_labels",
    prepare_cross_entropy,
    attributes="axis=INT",
    results=2,
    rule=rules.cross_entropy,
    result_names="loss backprop",
)
_LINEAR_CROSS_ENTROPY = "scale=FLOAT? cap=FLOAT?"
row(
    "LinearCrossEntropy",
    "input weight labels bias?",
    prepare_linear_cross_entropy,
    attributes=_LINEAR_CROSS_ENTROPY,
    results=3,
    rule=linear_cross_entropy_types,
    result_names="loss spread logsumexp",
)
row(
    "LinearCrossEntropyGrad",
    "loss_grad spread_grad logsumexp_grad logsumexp input weight labels bias?",
    in_float32(prepare_linear_cross_entropy_grad),
    attributes=f"{_LINEAR_CROSS_ENTROPY} is_trained=BOOL",
    results=None,
    rule=linear_cross_entropy_types,
    result_names="input_grad weight_grad bias_grad",
)
row("LayerNorm", "input beta gamma", prepare_layer_norm, attributes="epsilon=FLOAT?")
row(
    "LayerNormGrad",
    "grad input beta gamma",
    prepare_layer_norm_grad,
    attributes="epsilon=FLOAT?",
    results=3,
    result_names="result beta_grad gamma_grad",
)
_ATTENTION = "is_causal=BOOL scale=FLOAT? dropout=FLOAT? first_query=INT?"
row(
    "Attention",
    "query key value mask* kept?",
    prepare_attention,
    attributes=_ATTENTION,
    results=2,
    rule=attention_types,
    result_names="output logsumexp",
)
row(
    "AttentionGrad",
    "gradient query key value output logsumexp mask* kept?",
    in_float32(prepare_attention_grad),
    attributes=f"{_ATTENTION} mask_grad=INT? hides_rows=BOOL?",
    results=None,
    rule=attention_types,
    result_names="query_grad key_grad value_grad mask_grad",
)
row("L2Norm", "input", prepare_l2_norm, attributes="dims=INTS keepdim=BOOL?")
for _name, _taken, _prepare, _more in (
    ("RandomUniform", "minval maxval shape! key?", prepare_uniform, "global_seed=INT? operational_seed=INT?"),
    ("RandomNormal", "mean std key?", prepare_normal, "seed=INT?"),
    ("RandomBernoulli", "key", prepare_bernoulli, "probability=FLOAT"),
    ("RandomInteger", "key", prepare_integer, "low=INT high=INT"),
):
    row(
        _name,
        f"{_taken} wafers?",
        _prepare,
        attributes=f"{_more} part=INTS?",
        typed=Typed.REQUIRED,
        random=True,
        rule=rules.given,
    )

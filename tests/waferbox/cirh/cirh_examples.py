"""Single operations that several tests use: every one that can be executed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from image_examples import image_examples
from matrix_examples import matrix_examples
from special_examples import special_examples
from vendor_examples import vendor_examples
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder

F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool


@dataclass
class Example:
    """One operation on tensors."""

    name: str
    operands: list[torch.Tensor]
    attributes: Mapping[str, AttrValue] = field(default_factory=dict)
    result: tuple[Sequence[int], torch.dtype] | None = None
    constants: Sequence[int] = ()  # operands that are constants of the module
    results: Sequence[tuple[Sequence[int], torch.dtype]] = ()  # as `result`, where there are several
    read: int | None = None  # how many of the results are read, if not all

    def module(self) -> ModuleOp:
        b = GraphBuilder()
        values = [
            b.dense(t) if i in self.constants else b.argument(tensor_type(t.shape, t.dtype))
            for i, t in enumerate(self.operands)
        ]
        given = self.results if self.result is None else [self.result]
        types = [tensor_type(*type) for type in given] or None
        made = b.op(self.name, values, self.attributes, types=types)
        return b.finish([(result, None) for result in made[: self.read]])

    def inputs(self) -> list[torch.Tensor]:
        return [t for i, t in enumerate(self.operands) if i not in self.constants]


def _random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F32).to(dtype)


def examples() -> Iterator[Example]:
    """Every operation that can be executed, once or more."""
    r, ints = _random, torch.arange(12).reshape(3, 4)
    yes = r(3, 4) > 0.5
    for name in ("Add", "Sub", "Mul", "Div", "Pow", "Atan2"):
        yield Example(f"cirh.{name}", [r(3, 4), r(3, 4) + 1])
    yield Example("cirh.Div", [ints, ints + 1])
    for name in ("And", "Or", "Xor"):
        yield Example(f"cirh.{name}", [yes, ~yes])
        yield Example(f"cirh.{name}", [ints, ints + 1])
    unary = "Tanh Relu Sqrt Rsqrt Exp Log Sigmoid Abs Neg Cos Sin Floor Ceil Round Sign Erf Reciprocal Gelu RoundCb16"
    for name in unary.split():
        yield Example(f"cirh.{name}", [r(3, 4) + 0.1])
        yield Example(f"cirh.{name}", [r() + 0.1])
    yield Example("cirh.Not", [yes])
    yield Example("cirh.Gelu", [r(3, 4)], {"approximation": "TANH"})
    yield Example("cirh.GeluGrad", [r(3, 4), r(3, 4)], {"approximation": "NONE"})
    yield Example("cirh.ReluGrad", [r(3, 4), r(3, 4) - 0.5])
    yield Example("cirh.Cast", [r(3, 4)], {"Truncate": False}, ((3, 4), torch.float16))
    yield Example("cirh.Cast", [r()], result=((), I64))
    for direction in ("EQ", "NE", "LT", "LE", "GT", "GE"):
        yield Example("cirh.Compare", [r(3, 4), r(3, 4)], {"comparison_direction": direction})
    yield Example("cirh.Select", [yes, r(3, 4), r(3, 4) + 1])
    yield Example("cirh.Clamp", [r(3, 4), r() * 0.1, r() + 0.5])
    yield Example("cirh.Softmax", [r(3, 4)], {"axis": 1})
    yield Example("cirh.MaskFromTopK", [r(3, 4), torch.tensor(2)], {"dimension": 1})
    for a in (False, True):
        for b in (False, True):
            operands = [r(*((5, 3) if a else (3, 5))), r(*((4, 5) if b else (5, 4)))]
            yield Example("cirh.MatMul", operands, {"transpose_a": a, "transpose_b": b})
    for lhs, rhs in ((3, 3), (3, 2), (2, 2), (2, 3)):
        operands = [r(2, 3, *((4, 5) if lhs == 3 else (5, 4))), r(2, 3, *((6, 5) if rhs == 3 else (5, 6)))]
        yield Example("cirh.DotGeneral", operands, _dot([0, 1], [0, 1], [lhs], [rhs]))
    yield Example("cirh.DotGeneral", [r(4, 2, 5, 3), r(5, 2, 6, 4)], _dot([1], [1], [0, 2], [3, 0]))
    yield Example("cirh.BroadcastInDim", [r(4)], {"broadcast_dimensions": [1]}, ((3, 4), F32))
    yield Example("cirh.BroadcastInDim", [r(3)], {"broadcast_dimensions": [0]}, ((3, 4), F32))
    yield Example("cirh.BroadcastInDim", [r()], {"broadcast_dimensions": []}, ((3, 4), F32))
    yield Example("cirh.BroadcastInDim", [r(3, 1)], {"broadcast_dimensions": [0, 2]}, ((3, 2, 4), F32))
    yield Example("cirh.Reshape", [r(3, 4)], result=((2, 6), F32))
    yield Example("cirh.Transpose", [r(3, 4), torch.tensor([1, 0])], constants=[1])
    yield Example("cirh.Transpose", [r(3, 4, 2), torch.tensor([2, 0, 1])], constants=[1])
    for kind in ("ADD", "MAX", "MIN", "MUL"):
        yield Example("cirh.Reduce", [r(3, 4)], _reduce(kind, [0]))
        yield Example("cirh.Reduce", [r(3, 4)], _reduce(kind, [0, 1], [0, 1]))
        yield Example("cirh.Reduce", [r(3, 4, 2)], _reduce(kind, [0, 1], [1]))
        yield Example("cirh.Reduce", [ints], _reduce(kind, [1]))
    yield Example("cirh.Reduce", [yes], _reduce("AND", [0, 1]))
    yield Example("cirh.Reduce", [yes], _reduce("OR", [1], [1]))
    for kind in ("ARGMAX", "ARGMIN"):
        yield Example("cirh.Reduce", [r(3, 4)], _reduce(kind, [1]))
        yield Example("cirh.Reduce", [r(3, 4)], _reduce(kind, [1]), ((3,), torch.int32))
    yield Example("cirh.Concat", [r(3, 4), r(2, 4)], {"axis": 0})
    yield Example("cirh.Split", [r(5, 4)], {"split_sizes": [2, 3], "axis": 0})
    yield Example("cirh.Gather", [r(5, 4), ints % 5], {"axis": 0})
    yield Example("cirh.Gather", [r(5, 4), ints % 4], {"axis": 1})
    yield Example("cirh.ScatterNd", [r(5, 4), torch.tensor([[1], [1], [4]]), r(3, 4)])
    arange = [torch.tensor(0.0), torch.tensor(8.0), torch.tensor(1.0)]
    yield Example("cirh.Arange", arange, {"dim": 0}, constants=[0, 1, 2])
    yield Example("cirh.SparseSoftmaxCrossEntropyWithLogits", [r(3, 4), torch.tensor([0, 3, 1])], {"axis": 1})
    linear = [r(3, 2), r(4, 2), torch.tensor([0, 3, 1])]
    yield Example("cirh.LinearCrossEntropy", linear, {"scale": 0.5})
    yield Example("cirh.LinearCrossEntropy", [*linear, r(4)], {})
    yield Example("cirh.LinearCrossEntropyGrad", [r(3)] * 4 + linear, {"is_trained": False})
    yield Example("cirh.LinearCrossEntropyGrad", [r(3)] * 4 + [*linear, r(4)], {"is_trained": True, "scale": 0.5})
    yield Example("cirh.LayerNorm", [r(3, 4), r(4), r(4)], {"epsilon": 1e-5})
    yield from _attention_examples()
    yield Example("cirh.LayerNormGrad", [r(3, 4), r(3, 4) ** 2, r(4), r(4)], {"epsilon": 1e-5})
    yield from _random_examples()
    yield Example("cirh.L2Norm", [r(3, 4)], {"dims": [0, 1], "keepdim": False})
    yield from _aten_examples()
    for e in vendor_examples():
        yield Example(f"cirh.{e.name}", e.operands, e.attributes, None, e.constants, e.types, e.read)


def _dot(lb: list[int], rb: list[int], lc: list[int], rc: list[int]) -> dict[str, AttrValue]:
    return {
        "lhs_batching_dimensions": lb,
        "rhs_batching_dimensions": rb,
        "lhs_contracting_dimensions": lc,
        "rhs_contracting_dimensions": rc,
    }


def _reduce(kind: str, dimensions: list[int], keep: list[int] | None = None) -> dict[str, AttrValue]:
    return {"reduce_kind": kind, "dimensions": dimensions, "keep_dims": keep or []}


def _aten_examples() -> Iterator[Example]:
    r = _random
    a, b = r(3, 4), r(3, 4) + 0.5
    at = torch.tensor([0, 3, 1])
    probability = torch.log_softmax(a, 1)

    def e(name: str, *operands: torch.Tensor, **attributes: AttrValue) -> Example:
        return Example(f"aten.{name}", list(operands), attributes)

    yield e("_log_softmax", a, dim=1, half_to_float=False)
    yield e("_softmax", a, dim=-1, half_to_float=False)
    yield e("_log_softmax_backward_data", a, probability, dim=1, input_dtype="f32")
    yield e("_softmax_backward_data", a, b, dim=1, input_dtype="f32")
    for reduction in (0, 1, 2):
        nll = {"reduction": reduction, "ignore_index": -100}
        yield e("nll_loss_forward", probability, at, **nll, operand_segments=[1, 1, 0])
        yield e("nll_loss_forward", probability, at, r(4), **nll)
        gradient = r(3) if reduction == 0 else r()
        yield e("nll_loss_backward", gradient, probability, at, r(), **nll, operand_segments=[1, 1, 1, 0, 1])
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
            delta = {"mse_loss": {}, "smooth_l1_loss": {"beta": 1.0}, "huber_loss": {"delta": 1.0}}[name]
            yield e(name, a, b, reduction=reduction, **delta)
            yield e(f"{name}_backward", a if reduction == 0 else r(), a, b, reduction=reduction, **delta)
    yield e("binary_cross_entropy", a, b / 2, reduction=1, operand_segments=[1, 1, 0])
    yield e("binary_cross_entropy_backward", r(), a, b / 2, reduction=1, operand_segments=[1, 1, 1, 0])
    yield e("binary_cross_entropy_with_logits", a, b, reduction=1, operand_segments=[1, 1, 0, 0])
    yield e("addmm", r(4), r(3, 5), r(5, 4))
    yield e("addmm", r(3, 1), r(3, 5), r(5, 4), alpha=0.5, beta=2)
    yield e("mm", r(3, 5), r(5, 4))
    yield e("bmm", r(2, 3, 5), r(2, 5, 4))
    yield e("baddbmm", r(2, 3, 4), r(2, 3, 5), r(2, 5, 4))
    yield e("addmv", r(3), r(3, 5), r(5))
    yield e("mv", r(3, 5), r(5))
    yield e("dot", r(5), r(5))
    yield e("mean", a)
    yield e("mean.dim", a, dim=[1], keepdim=True)
    yield e("mean.dim", a)
    yield e("var.correction", a, dim=[1], correction=1)
    yield e("std.correction", a, dim=[0], correction=0, keepdim=True)
    yield e("var_mean.correction", a, dim=[1], correction=1)
    yield e("linalg_vector_norm", a)
    yield e("linalg_vector_norm", a, ord=1, dim=[0], keepdim=True)
    for name in ("amax", "amin"):
        yield e(name, a, dim=[1])
        yield e(name, a)
    for name in ("any", "all"):
        yield e(name, a > 0.5)
        yield e(f"{name}.dim", a > 0.5, dim=1)
        yield e(f"{name}.dims", a > 0.5, dim=[0, 1])
    for name in ("argmax", "argmin"):
        yield e(name, a)
        yield e(name, a, dim=1, keepdim=True)
    yield e("max.dim", a, dim=1)
    yield e("min.dim", a, dim=1)
    yield e("topk", a, k=2)
    yield e("sort", a)
    yield e("sort.stable", a, stable=True, dim=0, descending=True)
    yield e("kthvalue", a, k=2)
    for name in ("cumsum", "cumprod"):
        yield e(name, a, dim=1)
    yield e("logsumexp", a, dim=[1])
    yield e("prod", a)
    yield e("prod.dim_int", a, dim=1)
    for name in ("maximum", "minimum", "fmod.Tensor", "remainder.Tensor", "floor_divide"):
        yield e(name, a, b)
    for name in ("fmod.Scalar", "remainder.Scalar"):
        yield e(name, a, other=0.3)
    yield e("addcmul", a, b, a, value=0.5)
    yield e("xlogy.Tensor", a, b.abs())
    yield e("addcdiv", a, b, b, value=2)
    yield e("lerp.Scalar", a, b, weight=0.3)
    yield e("lerp.Tensor", a, b, a)
    yield e("select.int", a, dim=1, index=2)
    yield e("slice.Tensor", a, dim=1, start=1, end=3)
    yield e("select_backward", r(3), input_sizes=[3, 4], dim=1, index=2)
    yield e("slice_backward", r(3, 2), input_sizes=[3, 4], dim=1, start=1, end=3, step=1)
    yield e("select_scatter", a, r(3), dim=1, index=2)
    yield e("slice_scatter", a, r(3, 2), dim=1, start=1, end=3)
    yield e("index_select", a, at[:2] % 3, dim=0)
    yield e("index_add", a, at[:2] % 3, r(2, 4), dim=0)
    wide = torch.tensor([[0, 1], [3, 2], [0, 0]])
    yield e("gather", a, wide, dim=1)
    yield e("gather_backward", r(3, 2), a, wide, dim=1, sparse_grad=False)
    yield e("scatter.value", a, wide, dim=1, value=2.0)
    yield e("scatter.src", a, wide, r(3, 2), dim=1)
    yield e("scatter_add", a, wide, r(3, 2), dim=1)
    yield e("index.Tensor", a, at % 3, at)
    yield e("index_put", a, at % 3, at, r(3), accumulate=True, operand_segments=[1, 2, 1])
    yield e("stack", a, b, dim=1)
    yield e("stack", r(), r(), dim=0)
    yield e("cat", a, b, dim=1)
    yield e("split.Tensor", a, split_size=3, dim=1)
    yield e("split_with_sizes", a, split_sizes=[1, 3], dim=1)
    yield e("unbind.int", a, dim=0)
    yield e("flip", a, dims=[0])
    yield e("roll", a, shifts=[1], dims=[1])
    yield e("repeat", a, repeats=[2, 1, 3])
    yield e("arange.start_step", start=0, end=10, step=3)
    yield e("arange.start_step", start=0.0, end=1.0, step=0.25, dtype="f64")
    yield e("eye", n=3)
    yield e("tril", a, diagonal=0)
    yield e("triu", a, diagonal=1)
    yield e("diagonal", a)
    yield e("constant_pad_nd", a, pad=[1, 1], value=2)
    yield e("masked_fill.Scalar", a, a > 0.5, value=-1.0)
    yield e("masked_fill.Tensor", a, a > 0.5, r())
    yield from _network_examples(e)
    yield from image_examples(e)
    yield from special_examples(e)
    yield from matrix_examples(e)
    yield from _pointwise_examples(e)


def _random_examples() -> Iterator[Example]:
    key, wafer, whole = torch.tensor(-5), torch.tensor([1]), torch.tensor([4, 6])
    for dtype in (F32, F64, torch.bfloat16, torch.float16):
        low, high = torch.tensor(-1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)
        seeds = {"global_seed": 7, "operational_seed": -3}
        yield Example("cirh.RandomUniform", [low, high, whole], seeds, ((4, 6), dtype), constants=[2])
        yield Example("cirh.RandomUniform", [low, high, whole, key], {}, ((4, 6), dtype), constants=[2])
        yield Example("cirh.RandomNormal", [low, high], {"seed": 7}, ((5,), dtype))
        yield Example("cirh.RandomNormal", [low, high, key], {}, ((5,), dtype))
        part = {"part": [1, 2, 3]}
        yield Example("cirh.RandomUniform", [low, high, whole, key, wafer], part, ((4, 2), dtype), constants=[2])
    yield Example("cirh.RandomBernoulli", [key], {"probability": 0.25}, ((4, 6), BOOL))
    yield Example("cirh.RandomBernoulli", [key, wafer], {"probability": 0.25, "part": [0, 1, 2]}, ((2, 6), BOOL))
    yield Example("cirh.RandomInteger", [key], {"low": -4, "high": 9}, ((4, 6), I64))
    yield Example("cirh.RandomInteger", [key], {"low": 0, "high": 1 << 40}, ((4, 6), F64))


def _network_examples(e: Any) -> Iterator[Example]:
    r = _random
    x = r(3, 4)
    yield e("native_dropout_backward", x, x > 0.5, scale=1.25)
    for dtype in (F32, torch.bfloat16):
        y = r(3, 4, dtype=dtype)
        norm = [y, r(4, dtype=dtype), r(4, dtype=dtype)]
        yield e("native_layer_norm", *norm, normalized_shape=[4], eps=1e-5)
    yield e("native_layer_norm", r(3, 4, dtype=torch.bfloat16), r(4), r(4), normalized_shape=[4], eps=1e-5)
    plain = {"normalized_shape": [4], "output_mask": [True, True, True]}
    yield e("native_layer_norm_backward", x, x, r(3, 1), r(3, 1), r(4), r(4), **plain)
    image, weight = r(2, 4, 6, 6), r(3, 4, 3, 3)
    group = {"N": 2, "C": 4, "HxW": 36, "group": 2}
    yield e("native_group_norm", image, r(4), r(4), **group, eps=1e-5)
    mask = {"output_mask": [True, True, True]}
    yield e("native_group_norm_backward", image, image, r(2, 2), r(2, 2), r(4), **group, **mask)
    batch = [image, r(4), r(4), r(4), r(4)]
    yield e("_native_batch_norm_legit_functional", *batch, training=True, momentum=0.1, eps=1e-5)
    saved = [image, image, r(4), r(4), r(4), r(4), r(4)]
    yield e("native_batch_norm_backward", *saved, train=True, eps=1e-5, **mask)
    conv = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
    yield e("convolution", image, weight, r(3), **conv, groups=1)
    back = {**conv, "groups": 1, "bias_sizes": [3]}
    yield e("convolution_backward", r(2, 3, 6, 6), image, weight, **back, **mask)
    pool = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]}
    dilated = {**pool, "dilation": [1, 1], "ceil_mode": False}
    yield e("max_pool2d_with_indices", image, **dilated)
    indices = torch.nn.functional.max_pool2d(image, 2, return_indices=True)[1]
    yield e("max_pool2d_with_indices_backward", r(2, 4, 3, 3), image, indices, **dilated)
    average = {**pool, "ceil_mode": False, "count_include_pad": True}
    yield e("avg_pool2d", image, **average)
    yield e("avg_pool2d_backward", r(2, 4, 3, 3), image, **average)
    yield e("_adaptive_avg_pool2d", image, output_size=[2, 2])
    yield e("_adaptive_avg_pool2d_backward", r(2, 4, 2, 2), image)
    at = torch.tensor([[0, 3, 1]])
    yield e("embedding", r(5, 4), at)
    yield e("embedding_dense_backward", r(1, 3, 4), at, num_weights=5, padding_idx=-1, scale_grad_by_freq=False)
    scores, labels = torch.log_softmax(r(2, 4, 3, 3), 1), torch.ones(2, 3, 3, dtype=I64)
    nll = {"reduction": 1, "ignore_index": -100}
    yield e("nll_loss2d_forward", scores, labels, **nll, operand_segments=[1, 1, 0])
    yield e("nll_loss2d_backward", r(), scores, labels, r(), **nll, operand_segments=[1, 1, 1, 0, 1])


def _pointwise_examples(e: Any) -> Iterator[Example]:
    a, b = _random(3, 4), _random(3, 4) + 0.5
    unary = (
        "silu softplus elu leaky_relu hardtanh hardswish hardsigmoid mish gelu log1p log2 log10 expm1 exp2 erfc tan"
        " sinh cosh asin acos atan trunc frac nan_to_num isnan isinf isfinite sgn signbit logical_not"
        " log_sigmoid_forward"
    )
    for name in unary.split():
        yield e(name, a)
    for name in ("silu_backward", "tanh_backward", "sigmoid_backward", "hardswish_backward", "hardsigmoid_backward"):
        yield e(name, a, b)
    yield e("softplus_backward", a, b, beta=1.0, threshold=20.0)
    yield e("elu_backward", a, b, alpha=1.0, scale=1.0, input_scale=1.0, is_result=False)
    yield e("leaky_relu_backward", a, b, negative_slope=0.01, self_is_result=False)
    yield e("hardtanh_backward", a, b, min_val=-1.0, max_val=1.0)
    yield e("threshold_backward", a, b, threshold=0.7)
    yield e("gelu_backward", a, b, approximate="tanh")
    yield e("log_sigmoid_backward", a, b, a)
    yield e("clamp", a, min=0.2, max=0.5)
    yield e("clamp.Tensor", a, b, operand_segments=[1, 1, 0])
    yield e("clamp_min", a, min=0.3)
    yield e("clamp_max", a, max=0.3)
    yield e("round.decimals", a, decimals=1)
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield e(name, a > 0.5, b > 0.5)
    ints = torch.arange(12).reshape(3, 4)
    for name in ("bitwise_and.Scalar", "bitwise_or.Scalar", "bitwise_xor.Scalar"):
        yield e(name, ints, other=5)
    for name in ("bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor"):
        yield e(name, ints, torch.ones_like(ints))
    yield e("div.Tensor_mode", a, b, rounding_mode="floor")
    yield e("div.Scalar_mode", a, other=0.3, rounding_mode="trunc")
    yield e("where.ScalarSelf", a > 0.5, a, self=0.0)
    yield e("where.ScalarOther", a > 0.5, a, other=0.0)
    yield e("where.Scalar", a > 0.5, self=1.0, other=0.0)


def _attention_examples() -> Iterator[Example]:
    for dtype in (F32, F64, torch.bfloat16, torch.float16):
        heads = [_random(2, 3, 4, 8, dtype=dtype)] * 3
        plain: dict[str, AttrValue] = {"is_causal": True, "operand_segments": [1, 1, 1, 0, 0]}
        yield Example("cirh.Attention", heads, plain)
        yield Example("cirh.Attention", [*heads, _random(4, 4, dtype=dtype)], {"is_causal": False, "scale": 0.5})
        statistics = _random(2, 3, 4, dtype=F64 if dtype is F64 else F32)
        saved = [heads[0], *heads, heads[0], statistics]
        yield Example("cirh.AttentionGrad", saved, {**plain, "operand_segments": [1] * 6 + [0, 0]})
        mask = _random(2, 1, 1, 4, dtype=dtype)
        yield Example("cirh.AttentionGrad", [*saved, mask], {"is_causal": False})
        kept = _random(2, 3, 4, 4) > 0
        more = [_random(4, 4, dtype=dtype), _random(2, 1, 1, 4, dtype=dtype), kept]
        dropped = {"is_causal": False, "dropout": 2.0}
        yield Example("cirh.Attention", [*heads, *more], {**dropped, "operand_segments": [1, 1, 1, 2, 1]})
        segments = {"operand_segments": [1] * 6 + [2, 1]}
        yield Example("cirh.AttentionGrad", [*saved, *more], {**dropped, **segments, "mask_grad": 1})

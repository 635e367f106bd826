"""Fusion patterns: what is fused gives the same values, and nothing is fused that somebody else reads a part of."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, loss_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.fuse_bias import fuse_bias
from appliance.compiler.passes.fuse_cross_entropy import fuse_cross_entropy
from appliance.compiler.passes.fuse_layer_norm import fuse_layer_norm
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import body_ops, func_of
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import info, shape, tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

pytestmark = pytest.mark.parity

FLOAT = torch.float64
Pass = Callable[[ModuleOp], bool]
variations = settings(max_examples=60, database=None, derandomize=True)
LOC = Source(module="fc", op="linear", file="model.py", line=7)


def names(module: ModuleOp) -> Counter[str]:
    return Counter(op.name for op in body_ops(module))


def values_of(module: ModuleOp, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return Kernel.build(module)(inputs)


def inputs_for(module: ModuleOp) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for argument in func_of(module).block.args:
        size, dtype = info(argument)
        integers = torch.randint(0, 3, size, generator=generator)
        made.append(torch.randn(size, dtype=dtype, generator=generator) if dtype.is_floating_point else integers)
    return made


def check(module: ModuleOp, run: Pass, *, fuses: bool) -> ModuleOp:
    """Runs a pass, which does what it says, and compares the values before and after."""
    verify(module)
    inputs = inputs_for(module)
    expected = values_of(module, inputs)
    before = print_module(module)
    assert run(module) is fuses, before
    assert (print_module(module) == before) is not fuses
    verify(module)
    assert not run(module)
    for made, value in zip(values_of(module, inputs), expected, strict=True):
        torch.testing.assert_close(made, value, rtol=1e-12, atol=1e-12)
    return module


class Graph(GraphBuilder):
    """A builder with the operations that patterns are made of."""

    def one(self, name: str, *operands: SSAValue, **attributes: Any) -> SSAValue:
        return self.op(name, operands, attributes, LOC)[0]

    def float_argument(self, *size: int) -> SSAValue:
        return self.argument(tensor_type(size, FLOAT))

    def spread(self, value: SSAValue, size: Sequence[int], dims: Sequence[int]) -> SSAValue:
        result = [tensor_type(size, info(value).dtype)]
        return self.op("cirh.BroadcastInDim", [value], {"broadcast_dimensions": list(dims)}, LOC, types=result)[0]

    def both(self, name: str, left: SSAValue, right: SSAValue, swap: bool) -> SSAValue:
        return self.one(name, *((right, left) if swap else (left, right)))

    def module(self, *results: SSAValue) -> ModuleOp:
        return self.finish([(value, None) for value in results])


# -- bias


@variations
@given(
    swap=st.booleans(),
    flip=st.tuples(st.booleans(), st.booleans()),
    rows=st.booleans(),
    narrow=st.booleans(),
    read=st.sampled_from(["nothing", "product", "rows"]),
)
def test_bias(swap: bool, flip: tuple[bool, bool], rows: bool, narrow: bool, read: str) -> None:
    graph = Graph()
    a, b = (
        graph.float_argument(*((5, 6) if flip[0] else (6, 5))),
        graph.float_argument(*((4, 5) if flip[1] else (5, 4))),
    )
    bias = graph.float_argument(1 if narrow else 4)
    product = graph.one("cirh.MatMul", a, b, transpose_a=flip[0], transpose_b=flip[1])
    size = (2, 3, 4) if rows else (6, 4)
    shaped = graph.op("cirh.Reshape", [product], None, LOC, types=[tensor_type(size, FLOAT)])[0] if rows else product
    total = graph.both("cirh.Add", shaped, graph.spread(bias, size, [len(size) - 1]), swap)
    also = {"nothing": [], "product": [product], "rows": [shaped]}[read]
    module = check(graph.module(total, *also), fuse_bias, fuses=not also)
    if not also:
        assert names(module)["aten.addmm"] == 1
        assert not names(module)["cirh.MatMul"]
        assert not names(module)["cirh.Add"]
        assert all(source_of(op) == LOC for op in body_ops(module))


def test_a_bias_of_rows_stays() -> None:
    graph = Graph()
    product = graph.one("cirh.MatMul", graph.float_argument(4, 5), graph.float_argument(5, 4))
    check(
        graph.module(graph.one("cirh.Add", product, graph.spread(graph.float_argument(4), (4, 4), [0]))),
        fuse_bias,
        fuses=False,
    )


def test_a_product_whose_columns_are_taken_apart_stays() -> None:
    graph = Graph()
    product = graph.one("cirh.MatMul", graph.float_argument(3, 5), graph.float_argument(5, 4))
    (shaped,) = graph.op("cirh.Reshape", [product], types=[tensor_type((3, 2, 2), FLOAT)])
    total = graph.one("cirh.Add", shaped, graph.spread(graph.float_argument(2), (3, 2, 2), [2]))
    check(graph.module(total), fuse_bias, fuses=False)


# -- layer norm

MEANS = ["aten", "div", "mul"]
VARIANCES = ["mul", "pow", "var"]


def mean(graph: Graph, value: SSAValue, dims: list[int], kind: str, keep: bool) -> SSAValue:
    if kind == "aten":
        return graph.one("aten.mean.dim", value, dim=dims, keepdim=keep)
    kept = dims if keep else []
    total = graph.one("cirh.Reduce", value, dimensions=dims, keep_dims=kept, reduce_kind="ADD")
    count = torch.Size([shape(value)[dim] for dim in dims]).numel()
    factor = count if kind == "div" else 1 / count
    return graph.one("cirh.Div" if kind == "div" else "cirh.Mul", total, graph.splat(factor, shape(total), FLOAT))


@variations
@given(
    dims=st.sampled_from([[2], [1, 2]]),
    mean_kind=st.sampled_from(MEANS),
    variance=st.sampled_from(VARIANCES),
    keep=st.booleans(),
    divide=st.booleans(),
    affine=st.integers(0, 2),
    swaps=st.tuples(*[st.booleans()] * 4),
    read=st.sampled_from(["nothing", "nothing", "mean", "centred", "scale", "normal", "product"]),
)
def test_layer_norm(
    dims: list[int],
    mean_kind: str,
    variance: str,
    keep: bool,
    divide: bool,
    affine: int,
    swaps: tuple[bool, ...],
    read: str,
) -> None:
    graph = Graph()
    # Powers of two: then one by the number of elements is exact.
    size = (3, 2, 4)
    onto = [0, 1, 2] if keep else [dim for dim in range(3) if dim not in dims]
    x = graph.float_argument(*size)
    average = mean(graph, x, dims, mean_kind, keep)
    centred = graph.one("cirh.Sub", x, graph.spread(average, size, onto))
    if variance == "var":
        spread = graph.one("aten.var.correction", x, dim=dims, correction=0, keepdim=keep)
    else:
        two = graph.splat(2.0, size, FLOAT) if variance == "pow" else centred
        spread = mean(
            graph, graph.one("cirh.Pow" if variance == "pow" else "cirh.Mul", centred, two), dims, mean_kind, keep
        )
    above = graph.both("cirh.Add", spread, graph.splat(1e-3, shape(spread), FLOAT), swaps[0])
    scale = graph.spread(graph.one("cirh.Sqrt" if divide else "cirh.Rsqrt", above), size, onto)
    normal = graph.one("cirh.Div", centred, scale) if divide else graph.both("cirh.Mul", centred, scale, swaps[1])
    weights = [graph.spread(graph.float_argument(*(size[dim] for dim in dims)), size, dims) for _ in range(affine)]
    product = graph.both("cirh.Mul", normal, weights[0], swaps[2]) if affine else normal
    result = graph.both("cirh.Add", product, weights[1], swaps[3]) if affine == 2 else product
    also = {"mean": [average], "centred": [centred], "scale": [scale], "normal": [normal], "product": [product]}
    others = [value for value in also.get(read, []) if value is not result]
    if read in ("normal", "product") and others:
        # What is read lies within the whole norm; the smaller one that ends there is fused.
        module = check(graph.module(result, *others), fuse_layer_norm, fuses=True)
        assert names(module)["cirh.Add"] + names(module)["cirh.Mul"] > 0
        return
    module = check(graph.module(result, *others), fuse_layer_norm, fuses=not others)
    if not others:
        assert set(names(module)) == {"aten.native_layer_norm"}
        assert all(source_of(op) == LOC for op in body_ops(module))


@pytest.mark.parametrize("wrong", ["first dimension", "correction", "other variance", "unequal"])
def test_what_is_no_layer_norm_stays(wrong: str) -> None:
    graph = Graph()
    size, x, other = (3, 4), graph.float_argument(3, 4), graph.float_argument(3, 4)
    dims = [0] if wrong == "first dimension" else [1]
    centred = graph.one(
        "cirh.Sub", x, graph.spread(graph.one("aten.mean.dim", x, dim=dims, keepdim=True), size, [0, 1])
    )
    of = other if wrong == "other variance" else x
    correction = 1 if wrong == "correction" else 0
    variance_dims = [0, 1] if wrong == "unequal" else dims
    variance = graph.one("aten.var.correction", of, dim=variance_dims, correction=correction, keepdim=True)
    above = graph.one("cirh.Add", variance, graph.splat(1e-3, shape(variance), FLOAT))
    result = graph.one("cirh.Mul", centred, graph.spread(graph.one("cirh.Rsqrt", above), size, [0, 1]))
    check(graph.module(result), fuse_layer_norm, fuses=False)


class HandNorm(nn.Module):
    """Over the last dimension, which may be that of the samples."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.beta = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return centred * scale * self.gamma + self.beta


def forward_only(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        with torch.no_grad():
            return model(batch)

    return step


def test_traced_layer_norms_on_wafers() -> None:
    batches = [torch.randn(BATCH, 5, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(2)]
    traced = Traced(forward_only, HandNorm(6), batches[0])
    module = parse_module(traced.text)
    canonicalise(module)
    assert fuse_layer_norm(module)
    traced.check(batches, [(1, 1), (2, 1), (3, 2)])


def test_a_norm_over_the_samples_is_taken_apart_again() -> None:
    """It was written out of operations that SwarmX can reduce, and so it must stay possible."""

    def over_samples(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            with torch.no_grad():
                return model(batch.transpose(0, 1)).sum(1)

        return step

    batches = [torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(n)).double() for n in range(2)]
    for model in (HandNorm(1), nn.LayerNorm(BATCH, elementwise_affine=False)):
        traced = Traced(over_samples, model, batches[0])
        traced.check(batches, [(1, 1), (2, 1), (3, 2)])


# -- cross entropy


def traced_loss(**settings: Any) -> tuple[Traced, list[Any]]:
    """A linear layer and its loss, with a label in four that does not count."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(5, 7)
    extra = settings.pop("extra", "nothing")

    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            x, labels = batch
            logits = model(x)
            if extra == "log-probabilities":
                chances = F.log_softmax(logits, 1)
                loss = F.nll_loss(chances, labels, **settings)
                results = [chances.detach()]
            else:
                weight = model.bias.detach().abs() if extra == "class weights" else None
                loss = F.cross_entropy(logits, labels, weight, **settings)
                if loss.dim():
                    loss = (loss * batch[0][:, 0]).sum()
                results = [logits.detach()] if extra == "logits" else []
            loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = None
            return [loss.detach(), *gradients, *results]

        return step

    batches = []
    for _ in range(2):
        labels = torch.randint(0, 7, (BATCH,), generator=generator)
        labels[::4] = settings.get("ignore_index", -100)
        batches.append((torch.randn(BATCH, 5, generator=generator).double(), labels))
    return Traced(build, model, batches[0]), batches


def fused(text: str) -> tuple[bool, ModuleOp]:
    module = parse_module(text)
    canonicalise(module)
    return fuse_cross_entropy(module), module


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("extra", ["nothing", "logits"])
def test_cross_entropy(reduction: str, ignore_index: int, extra: str) -> None:
    traced, batches = traced_loss(reduction=reduction, ignore_index=ignore_index, extra=extra)
    before = parse_module(traced.text)
    did, module = fused(traced.text)
    assert did
    found = names(module)
    assert found["cirh.SparseSoftmaxCrossEntropyWithLogits"] == 1
    assert not any("log_softmax" in name or "nll" in name for name in found)
    verify(module)
    assert not fuse_cross_entropy(module)
    places = {source_of(op).backward for op in body_ops(module) if "CrossEntropy" in op.name}
    assert places == {False}
    lines = {source_of(op).line for op in body_ops(before)}
    assert {source_of(op).line for op in body_ops(module)} <= lines
    traced.check(batches, [(1, 1), (2, 1), (3, 2)])


def test_no_label_that_counts_is_nan_without_gradients_as_in_torch() -> None:
    traced, batches = traced_loss()
    _, module = fused(traced.text)
    inputs = [*traced.initial.values(), batches[0][0], torch.full((BATCH,), -100)]
    expected = values_of(parse_module(traced.text), inputs)
    assert expected[0].isnan()
    assert not expected[1].any()
    torch.testing.assert_close(values_of(module, inputs), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "settings", [{"extra": "log-probabilities"}, {"label_smoothing": 0.1}, {"extra": "class weights"}]
)
def test_losses_that_need_their_parts_stay(settings: dict[str, Any]) -> None:
    traced, batches = traced_loss(**settings)
    did, _ = fused(traced.text)
    assert not did
    traced.check(batches, [(1, 1), (2, 1)])


def test_a_loss_without_a_backward_pass_stays() -> None:
    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            with torch.no_grad():
                return F.cross_entropy(model(batch[0]), batch[1])

        return step

    _, batches = traced_loss()
    assert not fused(Traced(build, nn.Linear(5, 7), batches[0]).text)[0]


def test_half_precision_keeps_its_log_probabilities() -> None:
    """The gradient that the fused operation keeps would be rounded once more."""
    text = traced_loss()[0].text
    assert fused(text)[0]
    assert not fused(text.replace("f64", "bf16"))[0]


def test_classes_that_are_cut() -> None:
    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            x, labels = batch
            return loss_and_gradients(model, F.cross_entropy(model(x).transpose(0, 1), labels[:7]))

        return step

    _, batches = traced_loss()
    traced = Traced(build, nn.Linear(5, 7), batches[0])
    traced.check(batches[:1], [(2, 1)])

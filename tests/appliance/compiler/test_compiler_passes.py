"""Each pass alone: what it does on small text, and on random programs that it changes no value and can be repeated."""

import math
from collections import Counter

import pytest
import torch
from compiled_steps import Traced
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_programs import traced_program
from torch import nn
from whole_vectors import whole_vectors
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.cse import join_common_subexpressions
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.fold import LARGEST, fold_constants
from appliance.compiler.passes.sink_broadcasts import sink_broadcasts
from appliance.compiler.pipeline import PASSES, Pass
from cstorch.errors import CompileError as LoweringError
from waferbox.cirh.dialect.attributes import SplatAttr, dense
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.types import info, tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

pytestmark = pytest.mark.parity

# These may round differently; all others keep every bit.
FUSIONS = {"fuse-bias", "fuse-layer-norm", "fuse-cross-entropy", "fuse-attention"}


def module_of(arguments: str, body: str, results: str, kinds: str) -> ModuleOp:
    text = f"module {{ func @graph({arguments}) -> ({kinds}) {{\n{body}\nreturn {results} : {kinds} }} }}"
    module = parse_module(text)
    verify(module)
    return module


def names(module: ModuleOp) -> list[str]:
    return [op.name for op in body_ops(module)]


def line(module: str, backward: bool = False) -> str:
    return f'loc("{module}.{"bwd" if backward else "fwd"}/aten::op"("train.py":1:0))'


# -- canonical form


def test_views_of_views_and_back_go() -> None:
    module = module_of(
        "%x: tensor<2x3xf32>",
        """%p = cirh.Const dense<[1, 0]> : tensor<2xi64>
        %q = cirh.Const dense<[0, 1]> : tensor<2xi64>
        %0 = cirh.Transpose %x, %p : (tensor<2x3xf32>, tensor<2xi64>) -> tensor<3x2xf32>
        %1 = cirh.Transpose %0, %p : (tensor<3x2xf32>, tensor<2xi64>) -> tensor<2x3xf32>
        %2 = cirh.Transpose %1, %q : (tensor<2x3xf32>, tensor<2xi64>) -> tensor<2x3xf32>
        %3 = cirh.Reshape %2 : (tensor<2x3xf32>) -> tensor<6xf32>
        %4 = cirh.Reshape %3 : (tensor<6xf32>) -> tensor<3x2xf32>
        %5 = cirh.Cast %4 : tensor<3x2xf32> -> tensor<3x2xf32>
        %6 = cirh.Neg %5 : tensor<3x2xf32>""",
        "%6",
        "tensor<3x2xf32>",
    )
    assert canonicalise(module)
    eliminate_dead_code(module)
    assert names(module) == ["cirh.Reshape", "cirh.Neg"]


def test_transposes_go_into_products() -> None:
    module = module_of(
        "%x: tensor<2x3xf32>, %y: tensor<4x2xf32>",
        """%p = cirh.Const dense<[1, 0]> : tensor<2xi64>
        %0 = cirh.Transpose %x, %p : (tensor<2x3xf32>, tensor<2xi64>) -> tensor<3x2xf32>
        %1 = cirh.MatMul %0, %y {transpose_b = true} : (tensor<3x2xf32>, tensor<4x2xf32>) -> tensor<3x4xf32>""",
        "%1",
        "tensor<3x4xf32>",
    )
    canonicalise(module)
    eliminate_dead_code(module)
    (product,) = body_ops(module)
    assert print_module(module).count("transpose_a = true, transpose_b = true") == 1
    assert product.name == "cirh.MatMul"


# -- constants


def test_constants_of_one_value_stay_so() -> None:
    module = module_of(
        "",
        """%a = cirh.Const dense<2.0> : tensor<f32>
        %b = cirh.Const dense<3.0> : tensor<1000000x1000xf32>
        %0 = cirh.BroadcastInDim %a {broadcast_dimensions = dense<> : tensor<0xi64>}
            : (tensor<f32>) -> tensor<1000000x1000xf32>
        %1 = cirh.Div %0, %b : tensor<1000000x1000xf32>
        %2 = cirh.Compare %1, %b {comparison_direction = "LT"} : tensor<1000000x1000xf32> -> tensor<1000000x1000xi1>
        %3 = cirh.Cast %2 : tensor<1000000x1000xi1> -> tensor<1000000x1000xbf16>""",
        "%1, %3",
        "tensor<1000000x1000xf32>, tensor<1000000x1000xbf16>",
    )
    assert fold_constants(module)
    values = [value.owner.value for value in return_of(module).operands if isinstance(value.owner, Const)]
    assert [value.value for value in values if isinstance(value, SplatAttr)] == [float(torch.tensor(2.0) / 3), 1.0]
    eliminate_dead_code(module)
    assert names(module) == ["cirh.Const", "cirh.Const"]


def test_small_lists_are_folded_and_large_or_repeated_ones_are_not() -> None:
    size = LARGEST + 1
    listed = ", ".join(str(float(i)) for i in range(size))
    module = module_of(
        "",
        f"""%a = cirh.Const dense<[1.0, 2.0]> : tensor<2xf32>
        %b = cirh.Const dense<[{listed}]> : tensor<{size}xf32>
        %0 = cirh.Neg %a : tensor<2xf32>
        %1 = cirh.Neg %b : tensor<{size}xf32>
        %2 = cirh.BroadcastInDim %0 {{broadcast_dimensions = dense<[1]> : tensor<1xi64>}}
            : (tensor<2xf32>) -> tensor<3x2xf32>""",
        "%1, %2",
        f"tensor<{size}xf32>, tensor<3x2xf32>",
    )
    assert fold_constants(module)
    eliminate_dead_code(module)
    assert Counter(names(module)) == {"cirh.Const": 2, "cirh.Neg": 1, "cirh.BroadcastInDim": 1}
    assert "dense<[-1.000000e+00, -2.000000e+00]>" in print_module(module)


@settings(max_examples=60, database=None, derandomize=True)
@given(st.data())
def test_folded_constants_have_every_bit_that_the_operations_make(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int32]))
    size = data.draw(st.sampled_from([(), (1,), (3,), (2, 3), (80,)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    graph = GraphBuilder()

    def constant() -> SSAValue:
        if data.draw(st.booleans()):
            return graph.splat(data.draw(st.integers(-4, 4)) / (1 if dtype is torch.int32 else 3), size, dtype)
        return graph.dense((torch.randn(size, generator=generator) * 3).to(dtype))

    values = [constant(), constant()]
    for _ in range(4):
        name = data.draw(st.sampled_from(["Add", "Sub", "Mul", "Div", "Neg", "Abs", "Compare", "Reshape"]))
        if name == "Div" and dtype is torch.int32:
            continue
        left, right = data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values))
        if name == "Compare":
            (condition,) = graph.op("cirh.Compare", [left, right], {"comparison_direction": "LE"})
            made = graph.op("cirh.Select", [condition, left, right])
        elif name == "Reshape":
            (flat,) = graph.op("cirh.Reshape", [left], types=[tensor_type((max(1, math.prod(size)),), dtype)])
            made = graph.op("cirh.Reshape", [flat], types=[tensor_type(size, dtype)])
        else:
            made = graph.op(f"cirh.{name}", [left] if name in ("Neg", "Abs") else [left, right])
        values.append(made[0])
    module = graph.finish([(value, None) for value in values])
    expected = Kernel.build(module)([])
    fold_constants(module)
    verify(module)
    for result, value in zip(Kernel.build(module)([]), expected, strict=True):
        assert dense(result) == dense(value)
    if size != (80,):
        eliminate_dead_code(module)
        assert set(names(module)) == {"cirh.Const"}


@pytest.mark.parametrize(
    "body",
    [
        # Nobody says what an integer of infinity is, and how an integer is divided by zero.
        """%a = cirh.Const dense<0x7F800000> : tensor<2xf32>
        %0 = cirh.Cast %a : tensor<2xf32> -> tensor<2xi32>""",
        """%a = cirh.Const dense<1> : tensor<2xi32>
        %b = cirh.Const dense<0> : tensor<2xi32>
        %0 = cirh.Div %a, %b : tensor<2xi32>""",
    ],
)
def test_what_has_no_one_answer_is_not_folded(body: str) -> None:
    assert not fold_constants(module_of("", body, "%0", "tensor<2xi32>"))


# -- common subexpressions


def two_logarithms(first: str, second: str) -> int:
    """How many of two equal operations at these places are left."""
    module = module_of(
        "%x: tensor<2xf32>",
        f"""%0 = cirh.Log %x : tensor<2xf32> {first}
        %1 = cirh.Log %x : tensor<2xf32> {second}
        %2 = cirh.Add %0, %1 : tensor<2xf32> {second}""",
        "%2",
        "tensor<2xf32>",
    )
    assert join_common_subexpressions(module) is (len(names(module)) == 2)
    return len(names(module)) - 1


def test_equal_operations_are_joined_within_a_layer_and_a_pass_only() -> None:
    assert two_logarithms(line("h.0.attention"), line("h.0.mlp")) == 1
    assert two_logarithms(line("h.0.attention"), line("h.1.attention")) == 2
    assert two_logarithms(line("h.0.attention"), line("h.0.attention", backward=True)) == 2
    # What is outside all modules belongs to the layer before it.
    assert two_logarithms(line("h.0.attention"), line("")) == 1


def test_results_keep_values_of_their_own() -> None:
    module = module_of(
        "%x: tensor<2xf32>",
        "%0 = cirh.Log %x : tensor<2xf32>\n%1 = cirh.Log %x : tensor<2xf32>",
        "%0, %1",
        "tensor<2xf32>, tensor<2xf32>",
    )
    assert not join_common_subexpressions(module)


def test_notes_do_not_make_a_difference_and_attributes_do() -> None:
    body = """%0 = cirh.Gelu %x {{approximation = "NONE", cs.internal = {{}}}} : tensor<2xf32>
        %1 = cirh.Gelu %x {{approximation = "{}"}} : tensor<2xf32>
        %2 = cirh.Add %0, %1 : tensor<2xf32>"""
    for approximation, joined in (("NONE", True), ("TANH", False)):
        module = module_of("%x: tensor<2xf32>", body.format(approximation), "%2", "tensor<2xf32>")
        assert join_common_subexpressions(module) is joined


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    text = """module { func @graph() -> (tensor<2xf32>) {
        %a = cirh.Const dense<0.0> : tensor<f32>
        %b = cirh.Const dense<1.0> : tensor<f32>
        %s = cirh.Const dense<[2]> : tensor<1xi64>
        %0 = cirh.RandomUniform %a, %b, %s : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<2xf32>
        %1 = cirh.RandomUniform %a, %b, %s : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<2xf32>
        %2 = cirh.Sub %0, %1 : tensor<2xf32>
        return %2 : tensor<2xf32> } }"""
    module = parse_module(text)
    assert not join_common_subexpressions(module)
    assert not fold_constants(module)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(6, 6, dtype=x.dtype, device=x.device).tril()
        return x + self.fc(x @ keep).relu() @ keep


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


def test_equal_layers_stay_one_kernel() -> None:
    def build(model: nn.Module):  # type: ignore[no-untyped-def]
        return lambda batch: model(batch).sum().detach()

    traced = Traced(build, Blocks(), torch.randn(12, 6).double())
    layers = Counter(
        instruction.run.kernel for instruction in traced.plan(2).wafer.instructions if instruction.HasField("run")
    )
    assert max(layers.values()) >= 3, layers


# -- all passes on random programs


def round_trips(text: str) -> None:
    again = parse_module(text)
    verify(again)
    assert print_module(again) == text


def check_pass(
    step: Pass, module: ModuleOp, before: str, inputs: list[torch.Tensor], expected: list[torch.Tensor]
) -> tuple[str, list[torch.Tensor]]:
    """Runs a pass on a module, whose text and results are `before` and `expected`. Returns these after the pass."""
    changed = step.run(module)
    after = print_module(module)
    assert changed is (after != before), step.name
    if not changed:  # the text is that of before, and so is all that is made of it
        return before, expected
    round_trips(after)
    assert not step.run(module), f"{step.name} is not done when it says so"
    assert print_module(module) == after
    results = Kernel.build(module)(inputs)
    for made, value in zip(results, expected, strict=True):
        scale = float(value.abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
        tolerance = 1e-11 if step.name in FUSIONS else 0.0
        torch.testing.assert_close(made, value, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=step.name)
    return after, results


# Functions of one operand that torch approximates by other code for whole vectors than for the elements after them.
APPROXIMATED = ("Tanh", "Rsqrt", "Exp", "Log", "Sigmoid", "Cos", "Sin", "Erf", "Gelu")
EXACT = ("Relu", "Sqrt", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Reciprocal")


def broadcast_function(name: str, size: int, dtype: torch.dtype) -> ModuleOp:
    builder = GraphBuilder()
    values = builder.argument(tensor_type((size,), dtype), input="x")
    wide = tensor_type((size, 3), dtype)
    (spread,) = builder.op("cirh.BroadcastInDim", [values], {"broadcast_dimensions": [0]}, types=[wide])
    (result,) = builder.op(f"cirh.{name}", [spread])
    return builder.finish([(result, "output_0")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*EXACT, *APPROXIMATED])
def test_a_function_of_a_smaller_tensor_differs_in_its_last_bits_at_most(name: str, dtype: torch.dtype) -> None:
    """A broadcast may move behind a function, although torch may round the function of the smaller tensor otherwise.

    Torch has code for whole vectors, and other code for the elements after the last of them and for strided tensors. So
    the position of an element may change the last bits of a sigmoid, and so may each wafer's part of a batch, each
    micro-batch, and each pass that moves a view. A pass cannot promise more than the rest of the system: numbers are
    PyTorch's up to such roundings. A pass promises the same operation on the same numbers for each element, which is
    tested to the bit, as `whole_vectors` takes the position away.
    """
    torch.manual_seed(0)
    for size in (1, 3, 7, 8, 15, 16, 33):
        values = torch.rand(size, dtype=torch.float64).add(0.1).mul(3).to(dtype)
        module = broadcast_function(name, size, dtype)
        large, before = Kernel.build(module), print_module(module)
        assert sink_broadcasts(module) is (print_module(module) != before) is True
        small = Kernel.build(module)
        (expected,), (made,) = large([values]), small([values])
        if name in EXACT:
            assert torch.equal(made, expected)
        else:
            torch.testing.assert_close(made, expected)  # as near as torch's own tests ask of its functions
        with whole_vectors():
            (expected,), (made,) = large([values]), small([values])
        assert torch.equal(made, expected)


@pytest.mark.timeout(600)  # it runs each of twelve programs after each pass
def test_no_pass_changes_a_value() -> None:
    """Every pass but the fusions keeps every bit of an element, wherever it lies in its tensor.

    Operations are computed by `whole_vectors`: by torch's own loops the last bit of some functions depends on the
    position of an element, which passes change (see the test above), and a later floor or comparison makes any
    difference of it. So this test has no tolerance for such functions, and none for what follows from them.
    """
    found: Counter[str] = Counter()

    @seed(0)
    @settings(max_examples=12, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1 << 20), st.sampled_from([None, ["linear", "cross-entropy", "merge", "transpose"]]))
    def run(number: int, operations: list[str] | None) -> None:
        try:
            traced, batch = traced_program(number, operations)
        except LoweringError:
            return
        module = parse_module(traced.text)
        named = signature(module)
        given_inputs = {argument.argument: tensor for argument, tensor in zip(named.inputs, batch, strict=False)}
        for state in named.states:
            given_inputs[state.argument] = traced.initial[state.name]
        inputs = [given_inputs[index] for index in range(len(func_of(module).block.args))]
        assert [info(argument).shape for argument in func_of(module).block.args] == [tuple(i.shape) for i in inputs]
        text = print_module(module)
        round_trips(text)
        with whole_vectors():
            expected = Kernel.build(module)(inputs)
            # In order, and each on the text as it was traced.
            now, results, traced_module = text, expected, module.clone()
            for step in PASSES:
                if now != text:
                    check_pass(step, traced_module.clone(), text, inputs, expected)
                former = now
                now, results = check_pass(step, module, now, inputs, results)
                found[step.name] += now != former

    run()
    # Traced linear layers and layer norms are fused already, and the constants of these programs are.
    assert all(found[name] for name in ("canonicalise", "cse", "fuse-cross-entropy", "dce")), found

"""Operations that only the vendor's client writes, divided over wafers: equal to the same operations undivided."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_simulator import Simulation
from torch.nn import functional
from vendor_steps import (
    BATCH,
    CHANNELS,
    F64,
    I64,
    IMAGE,
    NORM,
    STEPS,
    TRAINED,
    Step,
    Tensor,
    dot,
    ints,
    pool,
    r,
    typed,
)
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy
from appliance.compiler.passes.vendor.norms import replace_norms
from appliance.compiler.passes.vendor.random_keys import COUNTER, add_random_keys
from appliance.compiler.passes.vendor.replacements import replace_slices
from appliance.compiler.pipeline import Target, compile_module
from appliance.compiler.plan_check.check import check_plan
from appliance.compiler.plan_check.roles import PlanError
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

pytestmark = pytest.mark.parity

WAFERS = (1, 2, 3)
GRADIENTS = {"FusedBatchNormGrad": typed(IMAGE, (4,), (4,)), "GroupNormGrad": []}
BATCH_NORM = "aten._native_batch_norm_legit.no_stats"


@pytest.mark.parametrize("name", STEPS)
def test_divided_is_as_undivided(name: str) -> None:
    step = STEPS[name]
    expected = step.whole()
    for wafers in WAFERS:
        torch.testing.assert_close(step.divided(wafers), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "step",
    [
        Step("Gather", [r(BATCH, 5), ints(5, 3)], {"axis": 0}, kinds="bs"),
        Step("GatherNd", [r(BATCH, 5), ints(5, 3, 1)], kinds="bs"),
        Step("ScatterNd", [r(7, 5), ints(7, BATCH, 1), r(BATCH, 5)], kinds="sbb"),
        Step("TopK", [r(BATCH)], {"dimension": 0, "k": 2}, [((2,), F64), ((2,), I64)]),
        Step("CumSum", [r(BATCH, 5)], {"axis": 0}),
        Step("unpad", [r(BATCH, 4)], {"edge_unpadding_high": [6, 0]}),
        Step("DotGeneral", [r(BATCH, BATCH, 3), r(BATCH, 3)], dot([1], [0], [2], [1])),
    ],
    ids=lambda step: step.name,
)
@pytest.mark.parametrize("wafers", WAFERS)
def test_what_mixes_samples(step: Step, wafers: int) -> None:
    torch.testing.assert_close(step.divided(wafers), step.whole(), rtol=1e-9, atol=1e-9)


def _norm_step(name: str, attributes: dict[str, Any], dtype: torch.dtype, *more: tuple[str, float]) -> ModuleOp:
    """A norm and its gradient, in one step. more: attributes that the norm has, and its gradient has not."""
    builder = GraphBuilder()
    image = builder.argument(tensor_type(IMAGE, dtype), input="input_0")
    gradient = builder.argument(tensor_type(IMAGE, dtype), input="input_1")
    weights = [builder.argument(tensor_type((4,), dtype), state=f"state.{number}") for number in range(4)]
    types = [image.type, *[weights[0].type] * 2]
    operands = {"FusedBatchNorm": weights, "GroupNorm": weights[:2]}[name]
    given: Any = types if name == "FusedBatchNorm" else None
    made = builder.op(f"cirh.{name}", [image, *operands], {**attributes, **dict(more)}, types=given)
    back = builder.op(f"cirh.{name}Grad", [gradient, image, weights[0]], attributes, types=given)
    return builder.finish([(made[0], "output"), *[(value, f"gradient_{n}") for n, value in enumerate(back)]])


@pytest.mark.parametrize("name", ["FusedBatchNorm", "GroupNorm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_norm_and_its_gradient_share_statistics(name: str, dtype: torch.dtype) -> None:
    attributes = TRAINED if name == "FusedBatchNorm" else {**NORM, "num_groups": 2}
    module = _norm_step(name, attributes, dtype)
    values = [tensor.to(dtype) for tensor in (r(*IMAGE), r(*IMAGE) ** 2, *CHANNELS)]
    expected = Kernel.build(module)(values)
    assert replace_norms(module)
    assert not replace_norms(module)
    verify(module)
    forward = [op for op in body_ops(module) if op.name in ("aten.native_group_norm", BATCH_NORM)]
    assert len(forward) == 1
    tolerance = 1e-9 if dtype is F64 else 2e-3
    torch.testing.assert_close(Kernel.build(module)(values), expected, rtol=tolerance, atol=tolerance)


def _by_torch(norm: Callable[..., Tensor], image: Tensor, gradient: Tensor, *weights: Tensor) -> list[Tensor]:
    """A norm, and its gradients by the image, scale and offset."""
    leaves = [tensor.clone().requires_grad_() for tensor in (image, *weights)]
    made = norm(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves, gradient)]


def _on_wafers(module: ModuleOp, wafers: int) -> list[Tensor]:
    plan = compile_module(print_module(module), Target(num_csx=wafers, num_shards=1))
    check_plan(plan)
    states = {f"state.{number}": value for number, value in enumerate(CHANNELS)}
    names = {slot.name for part in plan.memoryx for slot in part.states}
    simulation = Simulation(plan, {name: value for name, value in states.items() if name in names})
    (outputs,) = simulation.run([[r(*IMAGE), r(*IMAGE) ** 2]])
    return list(outputs.values())


@pytest.mark.parametrize("wafers", WAFERS)
def test_a_batch_norm_that_does_not_train_has_gradients(wafers: int) -> None:
    """Its gradient has no statistics among the operands: they are those of the norm."""
    scale, offset, mean, variance = CHANNELS
    module = _norm_step("FusedBatchNorm", {**NORM, "is_training": False}, F64)
    expected = _by_torch(
        lambda x, s, o: functional.batch_norm(x, mean, variance, s, o, False, 0.0, 1e-3),
        r(*IMAGE),
        r(*IMAGE) ** 2,
        scale,
        offset,
    )
    torch.testing.assert_close(_on_wafers(module, wafers), expected)


@pytest.mark.parametrize("wafers", WAFERS)
def test_the_gradient_of_a_group_norm_has_the_epsilon_of_the_norm(wafers: int) -> None:
    attributes = {"data_format": "NCHW", "num_groups": 2}
    module = _norm_step("GroupNorm", attributes, F64, ("epsilon", 0.3))
    expected = _by_torch(
        lambda x, s, o: functional.group_norm(x, 2, s, o, 0.3), r(*IMAGE), r(*IMAGE) ** 2, *CHANNELS[:2]
    )
    torch.testing.assert_close(_on_wafers(module, wafers), expected)


@pytest.mark.parametrize(
    ("name", "attributes", "why"),
    [
        ("FusedBatchNormGrad", {**NORM, "is_training": False}, "normalise each tensor by one BatchNorm"),
        ("GroupNormGrad", {"data_format": "NCHW", "num_groups": 2}, "normalise each tensor by one GroupNorm"),
    ],
)
def test_a_gradient_without_its_norm_is_refused(name: str, attributes: dict[str, Any], why: str) -> None:
    step = Step(name, [r(*IMAGE), r(*IMAGE), r(4)], attributes, GRADIENTS[name], kinds="bbs")
    with pytest.raises(CompileError, match=rf"train.py:53 \(in layer\): cirh.{name} .*{why}"):
        step.divided(1)


def _pools(backward: bool, sizes: tuple[int, int], made: tuple[int, int]) -> Step:
    """Adaptive pooling as the client writes it: with windows of one size."""
    strides = [size // count for size, count in zip(sizes, made, strict=True)]
    window = [s - (m - 1) * stride for s, m, stride in zip(sizes, made, strides, strict=True)]
    attributes = pool("AVERAGE", ksize=[1, 1, 1, *window], strides=[1, 1, 1, *strides], gradient=backward)
    image, pooled = (BATCH, 3, 1, *sizes), (BATCH, 3, 1, *made)
    second, result = (pooled, image) if backward else (image, pooled)
    op = "aten::_adaptive_avg_pool2d" + "_backward" * backward
    return Step("Pool", [r(*image), r(*second)], attributes, [(result, F64)], torch_op=op)


@pytest.mark.parametrize("wafers", WAFERS)
@pytest.mark.parametrize(("sizes", "made"), [((8, 8), (3, 3)), ((7, 9), (7, 4)), ((8, 6), (2, 3)), ((5, 8), (2, 1))])
def test_adaptive_pooling_has_the_windows_of_torch(sizes: tuple[int, int], made: tuple[int, int], wafers: int) -> None:
    forward, backward = _pools(False, sizes, made), _pools(True, sizes, made)
    image = forward.operands[0].clone().requires_grad_()
    expected = functional.adaptive_avg_pool2d(image[:, :, 0], made)
    (gradient,) = torch.autograd.grad(expected, image, backward.operands[1][:, :, 0])
    torch.testing.assert_close(forward.divided(wafers)[0][:, :, 0], expected.detach())
    torch.testing.assert_close(backward.divided(wafers)[0], gradient)


@pytest.mark.parametrize("wafers", WAFERS)
def test_integers_are_divided_as_the_script_says(wafers: int) -> None:
    """Div rounds to zero; the client writes it for // and % too."""
    whole, parts = ints(40, BATCH, 3) - 20, torch.tensor(3).expand(BATCH, 3)
    (cut,) = Step("Div", [whole, parts], torch_op="aten::div").divided(wafers)
    assert torch.equal(cut, torch.div(whole, parts, rounding_mode="trunc"))
    for name in ("aten::floor_divide", "aten::remainder"):
        (floor,) = Step("Div", [whole, parts], torch_op=name).divided(wafers)
        assert torch.equal(floor, whole // parts)
        assert not torch.equal(floor, cut)


def test_slices_become_operations_without_the_size_of_the_batch() -> None:
    for name in ("Slice", "StridedSlice", "StridedSliceGrad"):
        module = STEPS[name].module()
        expected = STEPS[name].whole()
        assert replace_slices(module)
        verify(module)
        names = {op.name for op in body_ops(module) if not isinstance(op, Const) and op.name != "cirh.Reshape"}
        assert names <= {"aten.slice.Tensor", "cirh.pad"}
        torch.testing.assert_close(Kernel.build(module)(STEPS[name].of_kind("b")), expected)


RANDOM = """module {
  func @graph(%arg0: tensor<12x40xf32> {cs.input_name = "input_0"}) -> (tensor<12x40xf32> {cs.output_name = "a"},
      tensor<12x40xf32> {cs.output_name = "b"}, tensor<12x40xf32> {cs.output_name = "c"}) {
    %low = cirh.Const dense<0.0> : tensor<f32>
    %high = cirh.Const dense<1.0> : tensor<f32>
    %shape = cirh.Const dense<[12, 40]> : tensor<2xi64>
    %0 = cirh.RandomUniform %low, %high, %shape {global_seed = -5 : i64} : (tensor<f32>, tensor<f32>, tensor<2xi64>)
      -> tensor<12x40xf32>
    %1 = cirh.RandomUniform %low, %high, %shape {global_seed = -5 : i64} : (tensor<f32>, tensor<f32>, tensor<2xi64>)
      -> tensor<12x40xf32>
    %2 = cirh.RandomNormal %low, %high {seed = 9 : i64} : (tensor<f32>, tensor<f32>) -> tensor<12x40xf32>
    %a = cirh.Add %0, %arg0 : tensor<12x40xf32>
    %b = cirh.Add %1, %arg0 : tensor<12x40xf32>
    %c = cirh.Add %2, %arg0 : tensor<12x40xf32>
    return %a, %b, %c : tensor<12x40xf32>, tensor<12x40xf32>, tensor<12x40xf32>
  }
}
"""


def _drawn(text: str, wafers: int, counter: int = 0) -> list[dict[str, Tensor]]:
    plan = compile_module(text, Target(num_csx=wafers, num_shards=1))
    check_plan(plan)
    return Simulation(plan, {COUNTER: torch.tensor(counter)}).run([[torch.zeros(BATCH, 40)]] * 2)


def test_random_numbers_differ_by_operation_and_step_and_by_nothing_else() -> None:
    first, second = _drawn(RANDOM, 1)
    values = [first["a"], first["b"], second["a"], second["b"]]
    for index, value in enumerate(values):
        assert abs(float(value.mean()) - 0.5) < 0.06
        assert all(not torch.equal(value, other) for other in values[:index])
    assert not torch.equal(first["c"], second["c"])
    for wafers in (2, 3):
        torch.testing.assert_close(_drawn(RANDOM, wafers), [first, second], rtol=0, atol=0)
    torch.testing.assert_close(_drawn(RANDOM, 2, counter=1)[0], second, rtol=0, atol=0)
    assert not torch.equal(_drawn(RANDOM.replace("-5", "-6"), 1)[0]["a"], first["a"])


def test_random_numbers_that_have_keys_stay_as_they_are() -> None:
    module = parse_module(RANDOM)
    assert add_random_keys(module)
    verify(module)
    assert [state.name for state in signature(module).states] == [COUNTER]
    text = print_module(module)
    assert not add_random_keys(module)
    assert print_module(module) == text
    assert Counter(op.name for op in body_ops(module))["cirh.RandomUniform"] == 2


def test_an_input_of_bytes_is_refused_by_name_with_a_way_out() -> None:
    """A mask in uint8, which the vendor's client compares as it is: the text says int8 for both types."""
    builder = GraphBuilder()
    mask = builder.argument(tensor_type((BATCH, 3), torch.int8), input="input_1")
    (same,) = builder.op("cirh.Compare", [mask, mask], {"comparison_direction": "EQ"})
    text = print_module(builder.finish([(same, "same")]))
    with pytest.raises(CompileError, match=r"input_1 is a tensor of torch.int8.* x.to\(torch.int32\)"):
        compile_module(text, Target(num_csx=1, num_shards=1))


@pytest.mark.parametrize("strategy", ExecutionStrategy)
def test_the_plan_names_the_tensors_of_a_batch_in_their_order(strategy: ExecutionStrategy) -> None:
    """The vendor's inputs stand in the order of first use, and those that nothing reads are not there."""
    builder = GraphBuilder()
    labels, ids = (builder.argument(tensor_type((BATCH,), F64), input=name) for name in ("input_y", "input_x"))
    (total,) = builder.op("cirh.Add", [labels, ids])
    text = print_module(builder.finish([(total, "sum")]))
    plan = compile_module(text, Target(num_csx=1, num_shards=1, execution_strategy=strategy))
    check_plan(plan)
    assert list(plan.worker.input_names) == ["input_y", "input_x"]
    plan.worker.input_names[1] = "input_y"
    with pytest.raises(PlanError, match="two inputs have one name"):
        check_plan(plan)

"""What mixed precision changes in a plan, and what it leaves alone."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from plan_simulator import Simulation
from reported_steps import MACHINE
from test_compiler_precision_parity import CASES, plain, simulated
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from appliance.compiler.artifacts import artifact_key
from appliance.compiler.core.precision_table import EXACT, LEVELS, Compute, row_of
from appliance.compiler.partition import precision as precision_pass
from appliance.compiler.pipeline import Half, Precision, Target
from appliance.compiler.report.builder import make_report
from waferbox.cirh.calls.cbfloat16 import round_to_cbfloat16
from waferbox.cirh.table.lookup import names
from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity

FLOAT32, BFLOAT16 = plan_pb2.ELEMENT_TYPE_FLOAT32, plan_pb2.ELEMENT_TYPE_BFLOAT16
WEIGHTS, REDUCTION = plan_pb2.GROUP_KIND_WEIGHTS, plan_pb2.GROUP_KIND_REDUCTION
BF16, F16, CB16 = (Precision(half=half) for half in (Half.BFLOAT16, Half.FLOAT16, Half.CBFLOAT16))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def batch() -> Any:
    return torch.randn(BATCH, 64), torch.randint(8, (BATCH,))


def training(loss_of: Callable[[Any, Any], torch.Tensor], rate: float = 0.1) -> Callable[[Any], Step]:
    def build(model: Any) -> Step:
        def step(batch: Any) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * rate)
            model.zero_grad()
            return loss.detach()

        return step

    return build


def classification(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@functools.cache
def traced() -> Traced:
    return Traced(training(classification), Network(), batch(), double=False)


def evaluation(forward: Callable[[Any, Any], Any], inputs: Any, model: nn.Module | None = None) -> Traced:
    """A step that only returns something of the batch, and keeps its weights."""
    return Traced(lambda model: lambda batch: forward(model, batch), model or Network(), inputs, double=False)


def members(plan: plan_pb2.Plan, kind: int) -> list[tuple[int, int]]:
    """Element type and elements of all that travels in groups of a kind."""
    found = {g.id: g for g in plan.wafer.groups if g.kind == kind}
    types = [member.type for group in found.values() for member in group.members]
    return [(type.element_type, torch.Size(type.shape).numel()) for type in types]


def run(step: Traced, inputs: Any, precision: Precision | None, wafers: int = 1) -> list[torch.Tensor]:
    results = Simulation(step.plan(wafers, 1, precision=precision), step.initial).run([tree_leaves(inputs)], 1)
    return list(results[0].values())


# -- what travels


@pytest.mark.parametrize("wafers", [1, 2])
def test_weights_are_streamed_in_half_and_kept_in_float32(wafers: int) -> None:
    plain, mixed = traced().plan(wafers), traced().plan(wafers, precision=BF16)
    assert {kind for kind, _ in members(plain, WEIGHTS)} == {FLOAT32}
    assert {kind for kind, _ in members(mixed, WEIGHTS)} == {BFLOAT16}
    elements = sum(p.numel() for p in Network().parameters())
    assert sum(count for _, count in members(plain, WEIGHTS)) == elements
    assert sum(count for _, count in members(mixed, WEIGHTS)) == elements
    for shard in mixed.memoryx:
        assert {slot.type.element_type for slot in shard.states} == {FLOAT32}
    streamed = [make_report(plan, "", MACHINE).totals.streamed_bytes for plan in (plain, mixed)]
    assert streamed[0] == 4 * elements
    assert streamed[1] < 0.51 * streamed[0]  # each weight begins at a multiple of 64 bytes


def test_gradients_of_several_wafers_are_added_up_in_float32() -> None:
    assert {kind for kind, _ in members(traced().plan(2, precision=BF16), REDUCTION)} == {FLOAT32}


def test_the_gradients_of_one_wafer_travel_as_they_were_computed() -> None:
    """Those of weights are products, in half; those of biases are sums, in float32, and so is the loss."""
    sent = members(traced().plan(1, precision=BF16), REDUCTION)
    assert sorted(count for kind, count in sent if kind == BFLOAT16) == [8 * 64, 64 * 64]
    assert sorted(count for kind, count in sent if kind == FLOAT32 and count > 1) == [8, 64]


def test_cbfloat16_travels_in_float32() -> None:
    plan = traced().plan(1, precision=CB16)
    assert {kind for kind, _ in members(plan, WEIGHTS)} == {FLOAT32}
    assert any("cirh.RoundCb16" in kernel.cirh for kernel in plan.wafer.kernels)


@pytest.mark.parametrize("precision", [BF16, F16, CB16])
def test_outputs_keep_their_type(precision: Precision) -> None:
    inputs = batch()
    step = evaluation(lambda m, b: (m(b[0]), m(b[0]).argmax(-1), m(b[0]) > 0.1), inputs)
    dtypes = [value.dtype for value in run(step, inputs, precision)]
    assert dtypes == [torch.float32, torch.int64, torch.bool]


# -- what is computed how


def kernels(plan: plan_pb2.Plan) -> str:
    return "\n".join(kernel.cirh for kernel in plan.wafer.kernels)


def test_without_precision_nothing_is_in_half() -> None:
    plan = traced().plan(2)
    assert not re.search("f16|Cb16", kernels(plan) + "".join(k.cirh for shard in plan.memoryx for k in shard.kernels))
    assert not plan.HasField("precision")


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_in_half_and_losses_in_float32(level: int) -> None:
    plan = traced().plan(1, precision=Precision(half=Half.BFLOAT16, level=level))
    lines = kernels(plan).splitlines()
    products = [line for line in lines if "MatMul" in line or "addmm" in line]
    losses = [line for line in lines if "CrossEntropy" in line]
    assert len(products) >= 5
    assert all("xbf16>" in line and "f32" not in line for line in products)
    assert losses
    assert all("xf32>" in line and "bf16" not in line for line in losses)
    assert (plan.precision.half, plan.precision.optimization_level) == (plan_pb2.HALF_TYPE_BFLOAT16, level)


def test_nothing_is_cast_twice() -> None:
    """No value is made in half, copied to float32, and cast to half again."""
    for kernel in traced().plan(1, precision=BF16).wafer.kernels:
        made = dict(re.findall(r"(%\w+) = cirh\.Cast (%\w+)", kernel.cirh))
        assert made
        assert not made.keys() & made.values()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.addmm", "HALF HALF HALF"),
        ("aten.convolution_backward", "HALF HALF HALF"),
        ("aten.embedding", "FLOAT FLOAT HALF"),
        ("aten.embedding_dense_backward", "FLOAT FLOAT FLOAT"),
        ("aten.native_layer_norm", "FLOAT FLOAT ROUNDED"),
        ("aten.native_group_norm", "FLOAT ROUNDED ROUNDED"),
        ("cirh.Softmax", "FLOAT FLOAT WIDEST"),
        ("cirh.Exp", "FLOAT FLOAT WIDEST"),
        ("aten._log_softmax", "FLOAT FLOAT FLOAT"),
        ("aten.mse_loss", "FLOAT FLOAT FLOAT"),
        ("aten.cumsum", "FLOAT FLOAT FLOAT"),
        ("cirh.Add", "WIDEST WIDEST WIDEST"),
        ("cirh.Gelu", "WIDEST WIDEST WIDEST"),
        ("cirh.Reshape", "WIDEST WIDEST WIDEST"),
    ],
)
def test_the_levels(name: str, expected: str) -> None:
    follows = {Compute.NARROWEST: "WIDEST"}  # the same rule, as level 2 has it
    assert " ".join(follows.get(row_of(name, level), row_of(name, level).name) for level in LEVELS) == expected


def test_every_row_of_the_table_is_an_operation() -> None:
    assert set(names()) >= EXACT
    for level in LEVELS:
        assert all(isinstance(row_of(name, level), Compute) for name in names())


# -- numbers


def test_cbfloat16_rounds_after_each_operation() -> None:
    inputs = batch()
    step = evaluation(lambda m, b: F.relu(b[0] @ m.fc1.weight), inputs)
    weight = step.initial["state.model.fc1.weight"]
    x, w = round_to_cbfloat16(inputs[0]), round_to_cbfloat16(weight)
    (result,) = run(step, inputs, CB16)
    assert torch.equal(result, F.relu(round_to_cbfloat16(x @ w)))
    assert not torch.equal(result, F.relu(inputs[0] @ weight))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", Half)
def test_a_mask_does_not_become_infinite(half: Half, level: int) -> None:
    """A row that is masked everywhere has equal weights, not NaN."""
    inputs = torch.randn(BATCH, 64)

    def attention(model: Any, x: torch.Tensor) -> torch.Tensor:
        scores = x @ model.fc1.weight
        return scores.masked_fill(scores < torch.inf, torch.finfo(torch.float32).min).softmax(-1)

    (weights,) = run(evaluation(attention, inputs), inputs, Precision(half=half, level=level))
    torch.testing.assert_close(weights, torch.full((BATCH, 64), 1 / 64))


def test_a_number_that_half_cannot_hold_is_taken_as_it_is() -> None:
    inputs = torch.randn(BATCH, 64)
    step = evaluation(lambda m, x: (x @ m.fc1.weight) * 0.1, inputs)
    weight = step.initial["state.model.fc1.weight"].bfloat16()
    (result,) = run(step, inputs, BF16)
    product = inputs.bfloat16() @ weight
    assert torch.equal(result, (product * 0.1).float())
    assert not torch.equal(result, (product * torch.tensor(0.1).bfloat16()).float())


def test_a_loss_that_the_user_scales_keeps_small_gradients_in_float16() -> None:
    """Without a scale the gradients of this loss are too small for float16, and nothing is learnt."""

    def change(scale: float) -> torch.Tensor:
        def build(model: Any) -> Step:
            def step(batch: Any) -> torch.Tensor:
                loss = F.mse_loss(model(batch[0]), batch[0][:, :8]) * 1e-6
                (loss * scale).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad / scale * 1e5)
                return loss.detach()

            return step

        torch.manual_seed(3)
        inputs = batch()
        step = Traced(build, Network(), inputs, double=False)
        (_,), states = step.expected([inputs])
        simulation = Simulation(step.plan(2, precision=F16), step.initial)
        simulation.run([list(inputs)], 1)
        name = "state.model.fc1.weight"
        wanted, got = (values[name] - step.initial[name] for values in (states, simulation.states))
        return (got - wanted).norm() / wanted.norm()

    assert change(1.0) > 0.1
    assert change(2.0**16) < 2e-3


@pytest.mark.parametrize("level", LEVELS)
def test_the_casts_change_nothing_but_precision(level: int) -> None:
    """With float64 in the place of half, all that the casts may do wrong would be far from the float32 result."""
    with mock.patch.dict(precision_pass._DTYPES, {Half.BFLOAT16: torch.float64}):
        for case in CASES.keys() - {"fused"}:  # whose statistics are float64 then
            runs = simulated(case, Precision(half=Half.BFLOAT16, level=level), 2, 1.0)
            for ours, torch_s in zip(runs, plain(case, None, 1.0), strict=True):
                torch.testing.assert_close(ours.losses, torch_s.losses, rtol=1e-5, atol=0)
                torch.testing.assert_close(ours.weights, torch_s.weights, rtol=1e-4, atol=1e-6)


# -- settings


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 0, 1 and 2, not 3"):
        Precision(half=Half.FLOAT16, level=3)
    with pytest.raises(ValueError, match="no half precision 7"):
        Precision.from_proto(plan_pb2.Precision(half=7, optimization_level=1))  # type: ignore[arg-type]


def test_artifacts_of_different_precision_have_different_names() -> None:
    targets = [Target(num_csx=1, num_shards=1, precision=precision) for precision in (None, BF16, F16, CB16)]
    targets.append(Target(num_csx=1, num_shards=1, precision=Precision(half=Half.BFLOAT16, level=2)))
    assert len({artifact_key("text", target) for target in targets}) == len(targets)


@pytest.mark.parametrize("half", Half)
def test_settings_survive_the_wire(half: Half) -> None:
    plan = traced().plan(1, precision=Precision(half=half, level=2))
    assert Precision.from_proto(plan.precision) == Precision(half=half, level=2)

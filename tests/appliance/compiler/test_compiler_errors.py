"""What the compiler refuses, and how it says so."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, kinds
from torch import nn

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.rewriter import layer_of
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.pipeline import Target, compile_module
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from waferbox.cirh import CirhError

X = torch.randn(BATCH, 6, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.register_buffer("kept", torch.zeros(BATCH, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def refusal(step: Callable[[Any, Any], Any], batch: Any = X, wafers: int = 2, **settings: Any) -> str:
    traced = Traced(lambda model: lambda batch: step(model, batch), Model(), batch)
    with pytest.raises(CompileError) as caught:
        traced.plan(wafers, **settings)
    return str(caught.value)


def test_an_operation_on_weights_alone_needs_no_rule() -> None:
    traced = Traced(lambda m: lambda x: m(x).sum().detach() + m.first.weight.sort(0)[0][0].sum().detach(), Model(), X)
    traced.check([X], [(2, 2)])


def test_a_batch_that_cannot_be_divided() -> None:
    message = refusal(lambda m, x: m(x).sum(), wafers=5)
    assert "12" in message
    assert "num_csx=5" in message
    assert "multiple of 5" in message


def test_an_input_without_dimensions() -> None:
    message = refusal(lambda m, batch: m(batch[0]).sum() * batch[1], (X, torch.tensor(1.0)))
    assert "input_1 has no dimensions" in message


def test_inputs_with_different_batch_sizes() -> None:
    message = refusal(lambda m, batch: m(batch[0]).sum() * batch[1].sum(), (X, torch.ones(3)))
    assert "input_1 has 3 rows, other inputs have 12" in message


def test_a_step_that_does_not_fit_a_wafer() -> None:
    message = refusal(lambda m, x: m(x).sum(), wafer_memory_bytes=100)
    assert re.search(r"needs \d+ B of a wafer's memory, \d+ B more than it has \(100 B\)", message)
    assert "micro_batch_size" in message


def test_weights_that_pass_through_need_not_fit_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(8)))
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), model, torch.randn(2, 400, dtype=torch.float64))
    weight = 400 * 400 * 8
    plan = traced.plan(1, wafer_memory_bytes=2 * weight)
    profiles = profile_kernels(plan.wafer.kernels)
    memory = plan_memory(plan.wafer, profiles, plan.wafer.memory_bytes)
    assert weight < memory.peak.total_bytes < 2 * weight
    assert memory.points[0].arriving_bytes == 7 * weight


def test_what_comes_from_outside_is_not_believed() -> None:
    with pytest.raises(CirhError):
        compile_module("module { nonsense", Target(num_csx=1, num_shards=1))
    with pytest.raises(ValueError, match="at least one"):
        Target(num_csx=0, num_shards=1)


# -- what a plan says


def test_states_stay_on_the_shard_that_has_them() -> None:
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), Model(), X)
    pinned = {"state.model.first.weight": 1}
    plan = traced.plan(1, 2, pinned_shards=pinned)
    assert [slot.name for slot in plan.memoryx[1].states if slot.name in pinned] == list(pinned)


def test_states_on_two_shards_that_are_updated_together() -> None:
    def build(model: Any) -> Any:
        def step(x: Any) -> Any:
            with torch.no_grad():
                model.kept.add_(model.first.weight.sum(0))
            return model(x).sum().detach()

        return step

    traced = Traced(build, Model(), X)
    with pytest.raises(CompileError, match="lies on shard"):
        traced.plan(1, 2, pinned_shards={"state.model.kept": 0, "state.model.first.weight": 1})


def test_equal_layers_share_kernels() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)))

    def build(model: Any) -> Any:
        def step(x: Any) -> Any:
            loss = model(x).sum()
            loss.backward()
            return loss.detach(), [parameter.grad for parameter in model.parameters()]

        return step

    plan = Traced(build, model, X).plan(2)
    assert len(plan.wafer.kernels) < kinds(plan)["run"]
    labels = {i.run.layer for i in plan.wafer.instructions if i.WhichOneof("kind") == "run"}
    assert {"0", "1", "2", "3", "1 backward"} <= labels


@pytest.mark.parametrize(
    ("path", "layer"),
    [("", ""), ("fc1", "fc1"), ("h.3.attention.query", "h.3"), ("3", "3"), ("model.layers.11.x.0", "model.layers.11")],
)
def test_layers_end_at_the_first_index(path: str, layer: str) -> None:
    assert layer_of(path) == layer

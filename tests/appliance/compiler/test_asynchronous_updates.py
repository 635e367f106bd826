"""Asynchronous updates in layer pipelined mode are those of plain PyTorch with the same delays."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from delayed_updates import train_with_delays, uses_of
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pipeline_simulator import PipelineSimulation
from random_programs import traced_program
from torch import nn
from torch.utils._pytree import tree_leaves

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy
from cstorch._internal.state import Registry, named_getters
from cstorch.errors import CompileError as LoweringError
from cstorch.optim import SGD, AdamW, Optimizer
from wsc.v1 import plan_pb2

PIPELINE = ExecutionStrategy.PIPELINE
ROWS, WIDTHS, STEPS = 12, (6, 9, 7, 8, 5), 3
# Each is run on the cluster, and by plain PyTorch on the CPU.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.2, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.02, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def trained(optimizer: Callable[[Any], Optimizer], model: nn.Module | None = None) -> Traced:
    def build(model: Any) -> Any:
        registry = Registry()
        updating = optimizer(model.parameters())
        registry.register("optimizer", updating)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            updating.zero_grad()
            loss.backward()
            updating.step()
            return loss.detach()

        return step, dict(named_getters(registry))

    return Traced(build, network() if model is None else model, torch.randn(ROWS, WIDTHS[0], dtype=torch.float64))


def plan_of(traced: Traced, micro_batches: int, cores: int, **more: Any) -> plan_pb2.Plan:
    more = {"asynchronous_updates": True, "execution_strategy": PIPELINE, **more}
    return traced.plan(1, micro_batches=micro_batches, wafer_cores=cores, **more)


def share_of_mean(result: torch.Tensor, step: int, micro_batch: int) -> torch.Tensor:
    return result.square().sum() / (ROWS * WIDTHS[-1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("micro_batches", "cores"), [(1, 2), (4, 1), (4, 2), (6, 3), (12, 4)])
def test_the_numbers_are_those_of_plain_pytorch_with_the_same_delays(
    optimizer: str, micro_batches: int, cores: int
) -> None:
    make = OPTIMIZERS[optimizer]
    traced = trained(make)
    plan = plan_of(traced, micro_batches, cores)
    batches = [torch.randn(ROWS, WIDTHS[0], dtype=torch.float64) for _ in range(STEPS)]
    model = network().double()
    expected = train_with_delays(model, make, batches, share_of_mean, uses_of(plan.pipeline), micro_batches)
    for chance in range(cores + 3):
        simulation = PipelineSimulation(plan, traced.initial)
        losses = [float(*result.values()) for result in simulation.run([[batch] for batch in batches], chance)]
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
        for name, parameter in model.named_parameters():
            state = simulation.states[f"state.model.{name}"]
            torch.testing.assert_close(state, parameter.detach(), rtol=1e-9, atol=1e-12)


def test_a_region_updates_before_others_have_ended_and_reads_what_it_has() -> None:
    plan = plan_of(trained(OPTIMIZERS["sgd"]), 6, 2)
    uses = uses_of(plan.pipeline)
    for layer in range(len(WIDTHS) - 1):
        own = [(kind, k) for kind, number, k in uses if number == layer]
        updates = [k for kind, k in own if kind == "update"]
        assert updates == list(range(6))
        # How many updates a forward pass has seen: all but those of the micro-batches in flight.
        seen = [sum(kind == "update" for kind, _ in own[: own.index(("forward", k))]) for k in range(6)]
        in_flight = [k - before for k, before in enumerate(seen)]
        assert max(in_flight) <= 2
        assert seen[-1] >= 4


def test_with_one_micro_batch_nothing_differs() -> None:
    traced = trained(OPTIMIZERS["adamw"])
    batches = [torch.randn(ROWS, WIDTHS[0], dtype=torch.float64) for _ in range(STEPS)]
    traced.check(batches, [(1, 1)], wafer_cores=2, execution_strategy=PIPELINE, asynchronous_updates=True)


class Tied(nn.Module):
    """The first weight is the last one's, too: regions read what another replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.first(x)).tanh())
        return result


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_weight_that_several_regions_read_is_the_same_at_every_speed(optimizer: str) -> None:
    traced = trained(OPTIMIZERS[optimizer], Tied())
    plan = plan_of(traced, 4, 3)
    batches = [[torch.randn(ROWS, 6, dtype=torch.float64)] for _ in range(STEPS)]
    runs = []
    for chance in range(6):
        simulation = PipelineSimulation(plan, traced.initial)
        losses = [float(*result.values()) for result in simulation.run(batches, chance)]
        runs.append((losses, [state.tolist() for _, state in sorted(simulation.states.items())]))
    assert all(run == runs[0] for run in runs)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


def test_what_needs_the_whole_batch_is_refused() -> None:
    with pytest.raises(CompileError, match=r"whole batch.*asynchronous_updates = False"):
        plan_of(trained(OPTIMIZERS["sgd"], Normed()), 4, 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"execution_strategy": ExecutionStrategy.WEIGHT_STREAMING}, "in weight streaming weights are updated once"),
        ({"num_replicas": 2}, "one replica of a model, not of num_replicas=2"),
    ],
)
def test_where_they_cannot_be_had_is_said(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        plan_of(trained(OPTIMIZERS["sgd"]), 2, 2, **asked)


@pytest.mark.parity
def test_random_programs_give_the_same_at_every_speed_or_are_refused() -> None:
    found: Counter[str] = Counter()

    @seed(0)
    @settings(max_examples=30, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1 << 20), st.sampled_from([2, 3, 4]), st.sampled_from([2, 3, 5]))
    def run(number: int, micro_batches: int, cores: int) -> None:
        try:
            traced, batch = traced_program(number)
            plan = plan_of(traced, micro_batches, cores)
        except (CompileError, LoweringError):
            found["refused"] += 1
            return
        inputs = [[leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]] * 2
        runs = []
        for chance in range(4):
            simulation = PipelineSimulation(plan, traced.initial)
            outputs = simulation.run(inputs, chance)
            runs.append([*(value for step in outputs for value in step.values()), *simulation.states.values()])
        for other in runs[1:]:
            for one, another in zip(runs[0], other, strict=True):
                torch.testing.assert_close(one, another, rtol=1e-9, atol=1e-12, equal_nan=True)
        found["the same"] += 1

    run()
    assert found["the same"] > 10, found

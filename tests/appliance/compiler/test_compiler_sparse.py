"""Sparse training on a simulated cluster: masks, their updates and what they prune, in MemoryX."""

from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from counted_random import CountedRandom
from plan_simulator import Simulation
from sparse_cases import CASES, LR, MOMENTUM, SparseCase, batches, losses_by_hand, network
from torch import nn
from torch.nn import functional as F

import cstorch
from cstorch import sparse
from cstorch._internal.state import Registry, named_getters
from cstorch.optim import SGD

pytestmark = pytest.mark.parity


def build(case: SparseCase, scaled: bool = False) -> Any:
    def built(model: Any) -> tuple[Step, Getters]:
        torch.manual_seed(3)
        algorithm = sparse.configure(case.config)
        model.apply(algorithm)
        optimizer = SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        optimizer.apply(algorithm)
        registry = Registry()
        registry.register("optimizer", optimizer)
        for each in algorithm.algorithms:
            registry.register("sparsity", each)
            for schedule in each.schedules() if isinstance(each, sparse.DynamicSparsityAlgorithm) else ():
                registry.register("sparsity", schedule)

        scaler = cstorch.amp.GradScaler(loss_scale="dynamic", init_scale=8.0) if scaled else None
        if scaler is not None:
            registry.register("grad_scaler", scaler)

        def step(batch: Any) -> torch.Tensor:
            features, labels = batch
            loss = F.cross_entropy(model(features), labels)
            cstorch.amp.optimizer_step(loss, optimizer, scaler)
            return loss

        return step, dict(named_getters(registry))

    return built


def masked_reference(traced: Traced) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model that plain torch trains, with the first masks applied, and these masks by the names of the weights."""
    masks = {
        name.removeprefix("state.model.").removesuffix("_mask"): value.clone()
        for name, value in traced.initial.items()
        if name.endswith("_mask")
    }
    with torch.no_grad():
        for name, mask in masks.items():
            traced.reference.get_parameter(name).mul_(mask)
    return traced.reference, masks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_on_every_cluster_equal_those_written_out(case: SparseCase) -> None:
    torch.manual_seed(0)
    data = batches(10, torch.float64)
    model = network()
    traced = Traced(build(case), model, data[0])
    reference, masks = masked_reference(traced)
    counter = int(traced.initial.get("state.random.counter", torch.tensor(0)))
    with CountedRandom(counter) as random:
        expected = losses_by_hand(case, reference, masks, data, random.next_step)
    for wafers, shards in [(1, 1), (1, 2), (2, 1), (2, 2)]:
        simulation = Simulation(traced.plan(wafers, shards), traced.initial)
        for result, loss in zip(simulation.run([[*batch] for batch in data]), expected, strict=True):
            torch.testing.assert_close(result["output_0"], loss, rtol=1e-9, atol=0)
        for name, mask in masks.items():
            assert torch.equal(simulation.states[f"state.model.{name}_mask"], mask), (name, wafers, shards)
            weight = simulation.states[f"state.model.{name}"]
            torch.testing.assert_close(weight, reference.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)
            assert not weight[~mask].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_overflows_keeps_masks_schedules_and_weights(case: SparseCase) -> None:
    """The run is that without the batches whose gradients are not finite; random numbers count steps of all kinds."""
    cstorch.backend("CSX", validate_only=True)
    torch.manual_seed(0)
    data = batches(10, torch.float64)
    traced = Traced(build(case, scaled=True), network(), data[0])
    bad = (torch.full_like(data[0][0], float("nan")), data[0][1])
    given = [*data[:3], bad, *data[3:6], bad, bad, *data[6:]]
    kept = [number for number, batch in enumerate(given) if batch is not bad]
    reference, masks = masked_reference(traced)
    steps_until_next = iter([after - number for number, after in zip(kept, [*kept[1:], len(given)], strict=True)])
    with CountedRandom(int(traced.initial.get("state.random.counter", torch.tensor(0)))) as random:

        def next_step() -> None:
            for _ in range(next(steps_until_next)):
                random.next_step()

        expected = losses_by_hand(case, reference, masks, data, next_step)
    for wafers, shards in [(1, 1), (2, 2)]:
        simulation = Simulation(traced.plan(wafers, shards), traced.initial)
        results = simulation.run([[*batch] for batch in given])
        for number, loss in zip(kept, expected, strict=True):
            torch.testing.assert_close(results[number]["output_0"], loss, rtol=1e-9, atol=0)
        for name, mask in masks.items():
            assert torch.equal(simulation.states[f"state.model.{name}_mask"], mask), (name, wafers, shards)
            weight = simulation.states[f"state.model.{name}"]
            torch.testing.assert_close(weight, reference.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [torch.tensor(2), torch.tensor([[1], [2]] * (BATCH // 2))], ids=["one", "of rows"])
def test_a_mask_along_the_features_is_made_where_the_samples_are(count: torch.Tensor) -> None:
    def built(model: Any) -> Step:
        def step(batch: Any) -> torch.Tensor:
            counts = batch[1] if count.dim() else count
            return torch.where(torch.ops.cstorch.mask_from_topk(batch[0], counts, 1), batch[0], 0.0)

        return step

    batch = (torch.randn(BATCH, 5, dtype=torch.float64), count.expand(BATCH, 1).contiguous())
    Traced(built, nn.Linear(1, 1), batch).check([batch], [(2, 1)])


def test_a_mask_along_the_samples() -> None:
    def step(batch: Any) -> torch.Tensor:
        return torch.ops.cstorch.mask_from_topk(batch, torch.tensor(2), 0)

    batch = torch.randn(BATCH, 5, dtype=torch.float64)
    traced = Traced(lambda model: step, nn.Linear(1, 1), batch)
    traced.check([batch], [(1, 1), (2, 1)])

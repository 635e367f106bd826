"""A dynamic loss scale on a simulated cluster, against torch's own GradScaler: skipped steps, and what they cost."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from plan_simulator import Simulation
from test_compiler_optimizers import committing_runs
from torch import nn

import cerebras_torch
import cstorch
from cstorch._internal.state import Registry, named_getters
from cstorch._internal.tracing import LazyTensor
from cstorch.amp.updates import total_norm
from cstorch.optim import SGD, AdamW, Optimizer
from waferbox.cirh.text.parser import parse_module
from waferbox.lair.lower import NotLowered, lower

pytestmark = pytest.mark.parity

CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2)]
SETTINGS: dict[str, Any] = {
    "loss_scale": "dynamic",
    "init_scale": 2.0**10,
    "steps_per_increase": 2,
    "max_loss_scale": 2.0**20,
}


@pytest.fixture(autouse=True)
def csx() -> None:
    torch.manual_seed(0)
    cstorch.backend("CSX", validate_only=True)


def torch_scaler(init_scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)


def training(
    make: Callable[[Any], Optimizer], clip: float | None = None, scaled: bool = True, **settings: Any
) -> Callable[[Any], tuple[Step, Getters]]:
    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        optimizer = make(model.parameters())
        registry.register("optimizer", optimizer)
        scaler: Any = None
        largest = clip
        if isinstance(model[0].weight, LazyTensor):
            largest = None if "max_gradient_norm" in settings else clip
            scaler = cstorch.amp.GradScaler(**{**SETTINGS, **settings}) if scaled else None
        elif scaled:
            scaler = torch_scaler(settings.get("init_scale", 2.0**10))
        if isinstance(scaler, cstorch.amp.GradScaler):
            registry.register("grad_scaler", scaler)

        def step(batch: Any) -> Any:
            features, targets = batch
            loss = (model(features) - targets).square().mean()
            cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=largest)
            return loss if scaler is None else (loss, torch.as_tensor(scaler.get_scale()))

        return step, dict(named_getters(registry))

    return build


def batches(*overflows: int, steps: int = 5) -> list[Any]:
    """In some steps gradients are infinite once they are scaled: those of the last row, so of the last wafer alone."""
    made = [(torch.randn(BATCH, 7, dtype=torch.float64), torch.randn(BATCH, 4, dtype=torch.float64))]
    made += [(torch.randn_like(made[0][0]), torch.randn_like(made[0][1])) for _ in range(steps - 1)]
    for number in overflows:
        made[number][1][-1] = 1e307
    return made


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_that_overflows_is_skipped_as_by_torch(optimizer: str, clip: float | None) -> None:
    given = batches(2)
    traced = Traced(training(OPTIMIZERS[optimizer], clip), network(), given[0])
    traced.check(given, CLUSTERS, rtol=1e-6 if optimizer == "adamw" else 1e-9)
    outputs, _ = traced.expected(given)
    scales = [float(scale) for _, scale in outputs]
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]  # doubled after two good steps, halved in the third


@pytest.mark.parametrize("exponent", [31, 70, 100])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("how", [{}, {"clip": 0.5}, {"clip": 0.5, "max_gradient_norm": 0.5}], ids=str)
def test_a_step_is_skipped_only_for_an_infinite_or_undefined_element(
    exponent: int, bad: float | None, how: dict[str, float]
) -> None:
    """Squares of the scaled gradients overflow float32 from 2^64 on, the gradients themselves do not."""
    given = [tuple(tensor.float() for tensor in batch) for batch in batches()]
    if bad is not None:
        given[2][1][-1, 0] = bad
    settings: dict[str, Any] = {"init_scale": 2.0**exponent, "max_loss_scale": 2.0**110, **how}
    traced = Traced(training(OPTIMIZERS["sgd"], **settings), network(), given[0], double=False)
    traced.check(given, CLUSTERS, rtol=1e-5)
    outputs, _ = traced.expected(given)
    doublings = [0, 1, 1, 2, 2] if bad is None else [0, 1, 0, 0, 1]
    assert [float(scale) for _, scale in outputs] == [2.0 ** (exponent + number) for number in doublings]


@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_of_one_gradient_decides(which: int, bad: float) -> None:
    gradients = [torch.full((3, 5), 1e38) for _ in range(4)]
    assert total_norm(gradients) < math.inf
    gradients[which][2, 3] = bad
    assert not total_norm(gradients) < math.inf


def scaled(model: Any, optimizer: Any) -> tuple[Step, Getters]:
    """A step with a dynamic scale: ours on a cluster, torch's in plain torch."""
    registry = Registry()
    registry.register("optimizer", optimizer)
    scaler: Any = torch_scaler()
    if isinstance(next(model.parameters()), LazyTensor):
        scaler = cstorch.amp.GradScaler(**SETTINGS)
        registry.register("grad_scaler", scaler)

    def step(batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        cstorch.amp.optimizer_step(loss, optimizer, scaler)
        return loss, torch.as_tensor(scaler.get_scale())

    return step, dict(named_getters(registry))


def test_gradients_of_samples_are_examined_on_all_wafers() -> None:
    """The rows of the parameter are those of the batch, of which each wafer has some."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(BATCH, 4))
            self.layer = nn.Linear(7, 4)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layer(features) + self.shift

    def build(model: Any) -> tuple[Step, Getters]:
        return scaled(model, OPTIMIZERS["sgd"](model.parameters()))

    given = batches(2)
    Traced(build, Shifted(), given[0]).check(given, CLUSTERS)


def simulated(given: list[Any], wafers: int = 1, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """The scale after each step, and all states before and after the steps."""
    traced = Traced(training(OPTIMIZERS["adamw"], **settings), network(), given[0])
    simulation = Simulation(traced.plan(wafers, 2), traced.initial)
    outputs = simulation.run(given)
    return [float(list(step.values())[1]) for step in outputs], traced.initial, simulation.states


def test_nothing_changes_in_a_skipped_step_but_the_scale_and_its_counters() -> None:
    scales, before, after = simulated(batches(0, steps=1), wafers=2)
    assert scales == [2.0**9]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"state.grad_scaler.0.loss_scale", "state.grad_scaler.0.num_skipped_steps"}
    assert int(after["state.grad_scaler.0.num_skipped_steps"]) == 1


def test_overflows_within_the_tolerance_skip_steps_and_keep_the_scale() -> None:
    scales, _, after = simulated(batches(2, 3), overflow_tolerance=0.4, steps_per_increase=5)
    # One overflow in three steps is tolerated, two in four are not.
    assert scales == [2.0**10, 2.0**10, 2.0**10, 2.0**9, 2.0**9]
    counters = {
        name.removeprefix("state.grad_scaler.0."): int(value) for name, value in after.items() if "steps" in name
    }
    assert counters == {"steps_since_rescale": 1, "num_skipped_steps": 2}
    assert int(after["state.grad_scaler.0.overflows_since_rescale"]) == 0


def test_the_scale_stays_within_its_bounds() -> None:
    bounds: dict[str, Any] = {"min_loss_scale": 2.0**9, "max_loss_scale": 2.0**11, "steps_per_increase": 1}
    assert simulated(batches(3, 4, 5, 6, steps=7), **bounds)[0] == [2.0**n for n in (11, 11, 11, 10, 9, 9, 9)]


def test_a_skipped_step_keeps_what_an_own_optimizer_has_marked() -> None:
    class Counting(SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.number = cstorch.zeros(())

        def step(self, closure: Any = None) -> Any:
            cstorch.amp.update_if_finite(self, self.number)
            self.number.add_(torch.where(torch.as_tensor(cstorch.amp.isfinite(self)), 1.0, 100.0))
            return super().step(closure)

    def build(model: Any) -> tuple[Step, Getters]:
        optimizer, scaler = Counting(model.parameters()), cstorch.amp.GradScaler(**SETTINGS)

        def step(batch: Any) -> Any:
            scaler.scale((model(batch[0]) - batch[1]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            return optimizer.number

        return step, {"state.number": lambda: optimizer.number}

    given = batches(1, steps=3)
    traced = Traced(build, network(), given[0])
    outputs = Simulation(traced.plan(1, 1), traced.initial).run(given)
    assert [float(number) for step in outputs for number in step.values()] == [1.0, 1.0, 2.0]


class Hooked(nn.Module):
    """A network with states that hooks of the optimizer change."""

    average: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 4)
        self.register_buffer("average", torch.zeros(4, 7))
        self.register_buffer("rows", torch.ones(3, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.layer(features)

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        assert self.layer.weight.grad is not None
        self.rows[1].add_(self.layer.weight.grad.sum())  # a view

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        self.layer.weight.clamp_(-0.2, 0.2)
        self.average.lerp_(self.layer.weight, 0.5)
        self.rows.view(-1)[2:4].mul_(0.5)
        self.count = self.count + self.average.sum()  # replaced, not written
        self.seen.mul_(2)  # replaced by the forward pass, and written
        self.first, self.second = self.second, self.first
        self.second.add_(1)


def test_hooks_of_the_optimizer_change_nothing_in_a_skipped_step() -> None:
    def build(model: Any) -> tuple[Step, Getters]:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        optimizer.register_step_pre_hook(model.before_step)
        optimizer.register_step_post_hook(model.after_step)
        return scaled(model, optimizer)

    given = batches(1, 2)
    Traced(build, Hooked(), given[0]).check(given, CLUSTERS)


def is_loop(text: str) -> bool:
    try:
        lower(parse_module(text))
    except NotLowered:
        return False
    return True


def memoryx_work(build: Any) -> list[tuple[list[str], list[str], int]]:
    """Of each shard: the kernels that are no generated loop, those that write to a tensor, and messages to shards."""
    batch = tuple(tensor.float() for tensor in batches()[0])
    plan = Traced(build, network(), batch, double=False).plan(2, 2)
    return [
        (
            [kernel.cirh for kernel in part.kernels if not is_loop(kernel.cirh)],
            committing_runs(part)[1],
            sum(bool(group.shards) for group in part.groups),
        )
        for part in plan.memoryx
    ]


def in_float32(norm: str) -> str:
    """The text of a norm in float64 as torch's own, of float32, has it."""
    assert "tensor<f64>" in norm
    of_float32 = norm.replace("f64>", "f32>").replace('dtype = "f64", ', "")
    return of_float32.replace("ord = 2 : i64", "ord = 2.000000e+00 : f64")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_costs_no_more_passes_and_messages_than_clipping(clip: float | None) -> None:
    """The norms are the only other kernels that pass over a gradient, and updates stay one generated loop each."""
    clipping = memoryx_work(training(OPTIMIZERS["adamw"], 0.5, scaled=False))
    scaling = memoryx_work(training(OPTIMIZERS["adamw"], clip))
    for (others, updates, exchanges), (norms, expected, allowed) in zip(scaling, clipping, strict=True):
        assert [in_float32(text) for text in others] == norms
        assert len(updates) == len(expected)
        assert all(map(is_loop, updates))
        assert exchanges == allowed


def test_the_oldest_release_unscales_in_the_step_of_the_optimizer() -> None:
    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        registry.register("optimizer", optimizer)
        on_device = isinstance(model[0].weight, LazyTensor)
        settings: dict[str, Any] = {"initial_loss_scale": 2.0**10, "steps_per_increase": 2, "max_loss_scale": 2.0**20}
        scaler: Any = cerebras_torch.amp.GradScaler("dynamic", **settings) if on_device else torch_scaler()
        if on_device:
            registry.register("grad_scaler", scaler)

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).square().mean()
            if on_device:
                scaler(loss).backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return loss, torch.as_tensor(scaler.get_scale())

        return step, dict(named_getters(registry))

    given = batches(2)
    Traced(build, network(), given[0]).check(given, [(2, 2)])

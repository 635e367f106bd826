"""Optimizers, schedules and metrics in a traced step: the graph, run again and again, equals the eager step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import BASIC, MORE, Case
from torch import nn
from traced_steps import Runner, names_of, outputs_of

from cstorch._internal.state import Registry, named_getters
from cstorch._internal.tracing import DEVICE, move_module, trace_step
from cstorch.errors import TraceError
from cstorch.metrics import AccuracyMetric
from cstorch.metrics import metric as metric_module
from cstorch.optim import SGD, Adam, AdamW, Optimizer
from cstorch.optim.lr_scheduler import (
    CosineDecayLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

STEPS = 20


class Training:
    """A model with everything that a step changes."""

    def __init__(
        self, model: nn.Module, make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], LRScheduler] | None
    ) -> None:
        self.model = model
        self.optimizer = make(model.parameters())
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.accuracy = AccuracyMetric("accuracy")
        self.registry = Registry()
        self.registry.register("model", model)
        self.registry.register("optimizer", self.optimizer)
        self.registry.register("metric", self.accuracy)
        for scheduler in _all_schedulers(self.scheduler):
            self.registry.register("scheduler", scheduler)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        inputs, labels = batch
        outputs = self.model(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.step()
        return loss, self.accuracy(labels, outputs.argmax(-1).int()), lr


def _all_schedulers(scheduler: LRScheduler | None) -> list[Any]:
    if scheduler is None:
        return []
    return [*getattr(scheduler, "_schedulers", []), scheduler]


def sequence(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.0, 0.1, 5), CosineDecayLR(optimizer, 0.1, 0.0, 10)], [5])


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda p: SGD(p, lr=0.1), None),
        (lambda p: SGD(p, lr=9.0, momentum=0.9, weight_decay=0.01, nesterov=True), lambda o: StepLR(o, 0.1, 5, 0.5)),
        (lambda p: Adam(p, lr=9.0, weight_decay=0.1, amsgrad=True), lambda o: MultiStepLR(o, 0.1, 0.5, [3, 9])),
        (lambda p: AdamW(p, lr=9.0, weight_decay=0.1), lambda o: LinearLR(o, 0.1, 0.01, 10)),
        (lambda p: AdamW(p, lr=9.0, correct_bias=False), lambda o: ExponentialLR(o, 0.1, 10, 0.5)),
        (lambda p: AdamW(p, lr=9.0), sequence),
    ],
)
def test_traced_equals_eager(
    make: Callable[[Any], Optimizer],
    schedule: Callable[[Optimizer], LRScheduler] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    check_traced(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), make, schedule, monkeypatch)


def check_traced(
    model: nn.Module,
    make: Callable[[Any], Optimizer],
    schedule: Callable[[Optimizer], LRScheduler] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_model = copy.deepcopy(model)
    move_module(device_model)
    eager = Training(model, make, schedule)
    monkeypatch.setattr(metric_module, "current_torch_device", lambda: DEVICE)
    traced = Training(device_model, make, schedule)
    batches = [(torch.randn(16, 6), torch.randint(0, 3, (16,))) for _ in range(STEPS)]
    getters = named_getters(traced.registry)
    trace = trace_step(traced.step, batches[0], getters, names_of(device_model), outputs_of)
    runner = Runner(trace)
    for batch in batches:
        expected = [float(torch.as_tensor(value).detach()) for value in eager.step(batch)]
        actual = [float(value) for value in runner.step(batch)]
        # A constant learning rate is no output of the step.
        assert actual == pytest.approx(expected[: len(actual)], rel=1e-5)
    for name, getter in named_getters(eager.registry).items():
        torch.testing.assert_close(runner.state[name], getter().detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", BASIC + MORE, ids=str)
def test_every_optimizer_traced_equals_eager(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bias = not case.only_matrices
    model = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3, bias=bias))
    check_traced(model, case.ours, lambda o: LinearLR(o, 0.1, 0.01, 10), monkeypatch)


def test_state_is_named_as_in_the_real_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_module, "current_torch_device", lambda: DEVICE)
    model = nn.Linear(2, 3)
    move_module(model)
    training = Training(model, lambda p: AdamW(p), lambda o: LinearLR(o, 0.1, 0.0, 10))
    trace = trace_step(
        training.step,
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)),
        named_getters(training.registry),
        names_of(model),
        outputs_of,
    )
    changed = {state.name for state in trace.states if state.changed}
    optimizer_state = ["exp_avg", "exp_avg_sq", "beta1_power", "beta2_power"]
    assert changed == {
        "state.model.weight",
        "state.model.bias",
        "state.schedulers.0.last_epoch",
        "state.metrics.accuracy.0.total_correct_predictions",
        "state.metrics.accuracy.0.total_num_tokens",
        *(f"state.optimizer.state.{index}.{name}" for index in range(2) for name in optimizer_state),
    }


def test_an_optimizer_of_a_model_elsewhere_cannot_step() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    move_module(model)
    optimizer = SGD(other.parameters(), lr=0.1)
    with pytest.raises(TraceError, match=r"test_optim_traced.py:\d+ the step steps SGD, none of whose"):
        trace_step(lambda batch: optimizer.step(), torch.ones(1, 2), {}, {}, outputs_of)


def test_an_optimizer_of_torch_that_reads_values_is_named() -> None:
    registry = Registry()
    model = nn.Linear(2, 2)
    move_module(model)
    registry.register("model", model)
    optimizer = torch.optim.Adafactor(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]

    with pytest.raises(TraceError, match=r"torch.optim.Adafactor decides by .* Use an optimizer of cstorch.optim"):
        trace_step(step, torch.ones(1, 2), named_getters(registry), {}, outputs_of)

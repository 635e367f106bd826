"""Optimizers, schedules, grad scalers and metrics that are copied or pickled go on as the originals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import metric_cases
import optimizer_cases
import pytest
import schedule_cases
import torch
from torch import nn

import cstorch
from cstorch import metrics
from cstorch.metrics import Metric
from cstorch.optim import SGD, Optimizer, lr_scheduler
from cstorch.optim.scheduler import Scheduler

Copy = Callable[[Any], Any]
COPIES: dict[str, Copy] = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}  # noqa: S301  our own
STEPS = 3


@pytest.fixture(params=["CPU", None], ids=["cpu", "no backend"], autouse=True)
def backend(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    if request.param is not None:
        cstorch.backend(request.param)


@pytest.fixture(params=COPIES)
def copied(request: pytest.FixtureRequest) -> Copy:
    return COPIES[request.param]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any = None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def assert_same_training(ours: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Each trains on alone, to the same weights."""
    before = [parameter.detach().clone() for parameter in ours[0].parameters()]
    train(*others)
    for parameter, value in zip(ours[0].parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    train(*ours)
    for parameter, other in zip(ours[0].parameters(), others[0].parameters(), strict=True):
        assert torch.equal(parameter, other)


# --- Optimizers -------------------------------------------------------------------------------------------------------


def test_there_is_a_case_of_each_class() -> None:
    classes = {
        kind
        for kind in vars(cstorch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    made = {type(case.ours([torch.zeros(2, 2, requires_grad=True)])) for case in optimizer_cases.BASIC}
    assert {kind.__name__ for kind in classes - made} <= {"Optimizer", "UpdateRule"}


@pytest.mark.parametrize("case", [*optimizer_cases.BASIC, *optimizer_cases.MORE], ids=str)
def test_a_copied_optimizer_trains_on(case: optimizer_cases.Case, copied: Copy) -> None:
    model = nn.Linear(4, 3, bias=not case.only_matrices)
    optimizer = case.ours(model.parameters())
    train(model, optimizer)
    other_model, other = copied((model, optimizer))
    assert other.parameters()[0] is other_model.weight
    assert other.enable_global_step == optimizer.enable_global_step
    assert_same_training((model, optimizer), (other_model, other))


def test_a_copy_has_no_hooks_as_in_torch_and_takes_new_ones(copied: Copy) -> None:
    for kind in (SGD, torch.optim.SGD):
        model = nn.Linear(4, 3)
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(_fail)
        other = copied(optimizer)
        other.step()
    assert isinstance(other, torch.optim.SGD)

    own = SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    own.register_zero_grad_pre_hook(_fail)
    own.register_zero_grad_post_hook(_fail)
    other = copied(own)
    other.zero_grad()
    calls: list[str] = []
    other.register_zero_grad_pre_hook(lambda *_: calls.append("before"))
    other.register_zero_grad_post_hook(lambda *_: calls.append("after"))
    other.zero_grad()
    assert calls == ["before", "after"]
    other.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    other.load_state_dict(other.state_dict())
    other.zero_grad()
    assert calls == ["before", "after"] * 2


def _fail(*_: Any) -> None:
    raise AssertionError("a hook of the original is called")


# --- Schedules --------------------------------------------------------------------------------------------------------


def sequence(own: Optimizer) -> Scheduler:
    parts = [lr_scheduler.LinearLR(own, 0.0, 0.1, 2), lr_scheduler.ExponentialLR(own, 0.1, 1, 0.5)]
    return lr_scheduler.SequentialLR(own, parts, [2])


def chain(own: Optimizer) -> Scheduler:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(own, 0.5), lr_scheduler.LinearLR(own, 1.0, 0.1, 9)])


def per_parameter(own: Optimizer) -> Scheduler:
    return lr_scheduler.ScalePerParamLR(own, lr_scheduler.LinearLR(own, 0.1, 0.0, 10))


SCHEDULES = {
    **{f"rate {case}": case.learning_rate for case in schedule_cases.CASES},
    **{f"decay {case}": case.weight_decay for case in schedule_cases.CASES},
    "sequence": sequence,
    "chain": chain,
    "per parameter": per_parameter,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_copied_schedule_goes_on_with_the_copied_optimizer(name: str, copied: Copy) -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.001, weight_decay=0.01)
    make: Any = SCHEDULES[name]
    schedule = make(optimizer)
    train(model, optimizer, schedule)
    other_model, other, other_schedule = copied((model, optimizer, schedule))
    assert other_schedule.optimizer is other
    assert other.schedulers == [other_schedule]
    assert optimizer.schedulers == [schedule]
    key = schedule.param_group_key
    before = float(optimizer.param_groups[0][key])
    train(other_model, other, other_schedule)
    assert float(optimizer.param_groups[0][key]) == before
    train(model, optimizer, schedule)
    assert float(other.param_groups[0][key]) == float(optimizer.param_groups[0][key])
    assert other_schedule.get_last_value() == schedule.get_last_value()
    assert int(other_schedule.last_epoch) == int(schedule.last_epoch) == 2 * STEPS


class Halving(lr_scheduler.LambdaLR):
    def set_value_lambda(self) -> Any:
        return [lambda epoch: 0.5**epoch]


def test_an_optimizer_that_is_copied_alone_keeps_its_rate_as_in_torch(copied: Copy) -> None:
    optimizer = SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    schedule = Halving(optimizer, 0.1)
    schedule.step()
    other = copied(optimizer)
    assert other.schedulers == []
    schedule.step()
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.05)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.025)


# --- GradScaler and metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
def test_a_copied_scaler_scales_on(loss_scale: Any, copied: Copy) -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = cstorch.amp.GradScaler(loss_scale, init_scale=2.0**5, max_gradient_norm=1.0)
    other_model, other, other_scaler = copied((model, optimizer, scaler))
    assert vars(other_scaler) == vars(scaler)
    loss = other_model(torch.ones(1, 4)).sum()
    cstorch.amp.optimizer_step(loss, other, other_scaler)
    assert not torch.equal(other_model.weight, model.weight)


def classes() -> dict[str, torch.Tensor]:
    return {name: torch.randint(metric_cases.CLASSES, (20,)) for name in ("labels", "predictions")}


def scores() -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(4, (20,)), "predictions": torch.rand(20, 4)}


METRICS: dict[str, tuple[Callable[[], Metric], Callable[[], dict[str, torch.Tensor]]]] = {
    **{case.name: (case.ours, classes) for case in metric_cases.CASES},
    "mean": (metrics.MeanMetric, lambda: {"value": torch.rand(20), "weight": torch.rand(20)}),
    "perplexity": (metrics.PerplexityMetric, lambda: {"labels": torch.randint(4, (20,)), "loss": torch.rand(())}),
    "precision at 2": (lambda: metrics.PrecisionAtKMetric(2), scores),
    "recall at 2": (lambda: metrics.RecallAtKMetric(2), scores),
    "area": (metrics.AUCMetric, lambda: {"labels": torch.randint(2, (20,)), "predictions": torch.rand(20)}),
}


def test_there_is_a_metric_of_each_class() -> None:
    exported = {getattr(metrics, name) for name in metrics.__all__} - {Metric, metrics.get_all_metrics}
    assert {type(make()) for make, _ in METRICS.values()} == exported


@pytest.mark.parametrize("name", METRICS)
def test_a_copied_metric_counts_on(name: str, copied: Copy) -> None:
    make, batch = METRICS[name]
    metric = make()
    metric(**batch())
    other = copied(metric)
    assert (float(other), other.num_updates) == (float(metric), 1)
    more, value = batch(), float(metric)
    other(**more)
    assert (float(metric), metric.num_updates) == (value, 1)
    metric(**more)
    assert (float(other), other.num_updates) == (float(metric), 2)

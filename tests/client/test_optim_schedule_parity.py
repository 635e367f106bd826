"""Every schedule over its whole range: against torch's of the same name, or its formula; untraced and traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from schedule_cases import CASES, EPOCHS, Case, of_torch, optimizer
from torch.optim import lr_scheduler as theirs
from traced_steps import Runner, trace

from cstorch._internal.lowering import lower
from cstorch._internal.tracing import DEVICE
from cstorch.optim import SGD, lr_scheduler, scheduler, weight_decay_scheduler
from cstorch.optim.lr_scheduler import LRScheduler
from cstorch.optim.scheduler import Scheduler


def close(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_learning_rate(case: Case) -> None:
    own = optimizer()
    schedule = case.learning_rate(own)
    assert isinstance(schedule, LRScheduler)
    found = []
    for _ in range(EPOCHS):
        found.append(own.param_groups[0]["lr"].item())
        assert schedule.get_last_lr() == [found[-1]]
        assert schedule.get_lr()[0].dtype == torch.float32
        own.step()
        schedule.step()
    assert found == close(case.values(EPOCHS))
    assert schedule.last_epoch.dtype == torch.int64
    assert schedule.last_epoch.item() == EPOCHS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_decay(case: Case) -> None:
    own = optimizer()
    schedule = case.weight_decay(own)
    assert isinstance(schedule, weight_decay_scheduler.WeightDecayScheduler)
    found = []
    for _ in range(EPOCHS):
        found.append(own.param_groups[0]["weight_decay"].item())
        schedule.step()
    assert found == close(case.values(EPOCHS))
    assert own.param_groups[0]["lr"] == 9.0


def with_parts(schedule: Scheduler) -> list[Scheduler]:
    parts = [with_parts(part) for part in getattr(schedule, "_schedulers", [])]
    return [schedule, *(part for found in parts for part in found)]


def traced_values(schedule: Scheduler, key: str) -> list[float]:
    """What a traced step, run again and again, computes for the setting."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        schedule.optimizer.step()
        value = schedule.optimizer.param_groups[0][key]
        schedule.step()
        return value + batch

    counters = with_parts(schedule)
    states = {f"state.{i}": (lambda counter=counter: counter.last_epoch) for i, counter in enumerate(counters)}
    traced = trace(step, torch.zeros(()), states)
    lower(traced)
    runner = Runner(traced)
    return [float(runner.step(torch.zeros(()))[0]) for _ in range(EPOCHS)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_traced_learning_rate(case: Case) -> None:
    found = traced_values(case.learning_rate(optimizer(device=DEVICE)), "lr")
    assert found == close(case.values(EPOCHS))


def test_traced_weight_decay() -> None:
    for case in CASES[:3]:
        found = traced_values(case.weight_decay(optimizer(device=DEVICE)), "weight_decay")
        assert found == close(case.values(EPOCHS))


def warmup_step_exponential(own: SGD) -> list[LRScheduler]:
    return [
        lr_scheduler.LinearLR(own, 0.25, 1.0, 4),
        lr_scheduler.StepLR(own, 1.0, 3, 0.5),
        lr_scheduler.ExponentialLR(own, 1.0, 1, 0.9),
    ]


def sequence(own: SGD) -> Scheduler:
    return lr_scheduler.SequentialLR(own, warmup_step_exponential(own), [4, 13])


def sequence_of_torch(own: torch.optim.Optimizer) -> object:
    parts = [theirs.LinearLR(own, 0.25, 1.0, 4), theirs.StepLR(own, 3, 0.5), theirs.ExponentialLR(own, 0.9)]
    return theirs.SequentialLR(own, parts, [4, 13])


def chain(own: SGD) -> Scheduler:
    return lr_scheduler.ChainedLR(warmup_step_exponential(own))


def chain_of_torch(own: torch.optim.Optimizer) -> object:
    return theirs.ChainedScheduler(
        [theirs.LinearLR(own, 0.25, 1.0, 4), theirs.StepLR(own, 3, 0.5), theirs.ExponentialLR(own, 0.9)]
    )


def chain_after_warmup(own: SGD) -> Scheduler:
    warmup, *others = warmup_step_exponential(own)
    return lr_scheduler.SequentialLR(own, [warmup, lr_scheduler.ChainedScheduler(others)], [4])


def test_combinations() -> None:
    after_warmup = [0.25, 0.4375, 0.625, 0.8125, *(0.5 ** (e // 3) * 0.9**e for e in range(EPOCHS - 4))]
    for make, expected in (
        (sequence, of_torch(sequence_of_torch)(EPOCHS)),
        (chain, of_torch(chain_of_torch)(EPOCHS)),
        (chain_after_warmup, after_warmup),
    ):
        own = optimizer()
        schedule = make(own)
        assert own.schedulers == [schedule]
        found = []
        for _ in range(EPOCHS):
            found.append(own.param_groups[0]["lr"].item())
            own.step()
            schedule.step()
        assert found == close(expected)
        assert traced_values(make(optimizer(device=DEVICE)), "lr") == close(expected)


def test_a_scale_for_each_group() -> None:
    first, second = (torch.zeros(1, requires_grad=True) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first], "adjust_learning_rate": 0.5}, {"params": [second]}]
    own = SGD(groups, lr=9.0)
    schedule = lr_scheduler.ScalePerParamLR(own, lr_scheduler.LinearLR(own, 1.0, 0.0, 10))
    assert schedule.adjustment_scalars == [0.5, 1.0]
    for expected in (1.0, 0.9, 0.8):
        assert schedule.get_last_lr() == pytest.approx([0.5 * expected, expected])
        assert [group["lr"].item() for group in own.param_groups] == pytest.approx([0.5 * expected, expected])
        own.step()
        schedule.step()
    with pytest.raises(ValueError, match="put it around"):
        lr_scheduler.SequentialLR(own, [schedule, lr_scheduler.ConstantLR(own, 0.1)], [3])


class Squares(lr_scheduler.LambdaLR):
    def set_value_lambda(self) -> list[Callable[[torch.Tensor], torch.Tensor | float]]:
        return [lambda epoch: 0.9**epoch]


def test_functions_of_the_script() -> None:
    expected = of_torch(lambda o: theirs.LambdaLR(o, lambda epoch: 0.9**epoch))(EPOCHS)
    own = optimizer()
    schedule = Squares(own, 1.0)
    found = []
    for _ in range(EPOCHS):
        found += schedule.get_last_lr()
        schedule.step()
    assert found == close(expected)
    assert traced_values(Squares(optimizer(device=DEVICE), 1.0), "lr") == close(expected)


def test_the_names_of_the_api() -> None:
    forms = {name.removesuffix("Scheduler") for name in scheduler.__all__} - {""}
    for name in forms:
        generic = getattr(scheduler, f"{name}Scheduler")
        rate = getattr(lr_scheduler, f"{name}LR", None) or getattr(lr_scheduler, name)
        assert issubclass(rate, generic)
        assert issubclass(rate, LRScheduler)
        decay = getattr(weight_decay_scheduler, f"{name}WD")
        assert issubclass(decay, generic)
        assert issubclass(decay, weight_decay_scheduler.WeightDecayScheduler)
    assert len(forms) == 19
    for module in (scheduler, lr_scheduler, weight_decay_scheduler):
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_goes_on_where_it_was(case: Case) -> None:
    first, second = case.learning_rate(optimizer()), case.learning_rate(optimizer())
    for _ in range(5):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(6):
        assert second.get_last_value() == first.get_last_value()
        first.step()
        second.step()


def test_errors() -> None:
    own = optimizer()
    with pytest.raises(ValueError, match="T_mult must be 1"):
        lr_scheduler.CosineAnnealingWarmRestarts(own, 0.1, 5, 2)
    with pytest.raises(ValueError, match="mode must be 'triangular'"):
        lr_scheduler.CyclicLR(own, 0.1, 1.0, mode="square")
    with pytest.raises(ValueError, match="anneal_strategy must be"):
        lr_scheduler.OneCycleLR(own, 0.1, 1.0, anneal_strategy="square")
    with pytest.raises(ValueError, match="LinearLR has no initial value, or 0"):
        lr_scheduler.ChainedLR([lr_scheduler.ConstantLR(own, 0.1), lr_scheduler.LinearLR(own, 0.0, 0.1, 5)])
    with pytest.raises(ValueError, match="must have its optimizer"):
        lr_scheduler.ChainedLR([lr_scheduler.ConstantLR(own, 0.1), lr_scheduler.ConstantLR(optimizer(), 0.1)])


GAMMA = 0.99999


@pytest.mark.parametrize(
    "make",
    [
        lambda own: lr_scheduler.StepLR(own, 0.1, 3, GAMMA),
        lambda own: lr_scheduler.ExponentialLR(own, 0.1, 3, GAMMA, staircase=True),
        lambda own: lr_scheduler.ExponentialLR(own, 0.1, 3, GAMMA),
        lambda own: weight_decay_scheduler.StepWD(own, 0.1, 3, GAMMA),
        lambda own: lr_scheduler.MultiplicativeLR(own, 0.1, GAMMA ** (1 / 3)),
    ],
)
def test_a_high_power_is_exact(make: Callable[[torch.optim.Optimizer], Scheduler]) -> None:
    schedule = make(optimizer())
    schedule.last_epoch.fill_(999_999)
    assert float(schedule.get()) == pytest.approx(0.1 * GAMMA**333_333, rel=2e-7)


def test_the_end_of_a_long_decay_is_exact() -> None:
    schedule = lr_scheduler.PolynomialLR(optimizer(), 0.1, 0.0, 1_000_000, power=2.0)
    schedule.last_epoch.fill_(999_999)
    assert float(schedule.get()) == pytest.approx(0.1 * 1e-6**2, rel=2e-7, abs=0)

"""What schedules save and load: by the names that the real system has, of this release and of older ones."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from schedule_cases import optimizer

from cstorch.optim import SGD, Adam, AdamW, lr_scheduler, weight_decay_scheduler
from cstorch.optim.scheduler import Scheduler

COMMON = {"last_epoch", "param_group_tags", "total_iters", "_get_called_within_step", "_last_value", "_step_count"}

# As release 2.10 of the real system saves them, after three steps.
REAL: dict[str, Mapping[str, Any]] = {
    "LinearLR": {
        "param_group_tags": None,
        "_last_value": [0.71],
        "total_iters": 10,
        "last_epoch": torch.tensor(3),
        "_step_count": 4,
        "_get_called_within_step": False,
        "initial_learning_rate": 1.0,
        "end_learning_rate": 0.0,
        "power": 1.0,
        "cycle": False,
    },
    "CyclicLR": {
        "param_group_tags": None,
        "_last_value": [0.0],
        "total_iters": None,
        "last_epoch": torch.tensor(3),
        "_step_count": 4,
        "_get_called_within_step": False,
        "base_lr": 0.5,
        "max_lr": 1.5,
        "step_size_up": 2,
        "step_size_down": 4,
        "mode": "exp_range",
        "gamma": 0.5,
        "scale_mode": "iterations",
    },
}


def make_linear(own: SGD) -> Scheduler:
    return lr_scheduler.LinearLR(own, 5.0, 4.0, 7)


def make_cyclic(own: SGD) -> Scheduler:
    return lr_scheduler.CyclicLR(own, 0.1, 0.2)


@pytest.mark.parametrize(
    ("make", "state", "rate"),
    [(make_linear, REAL["LinearLR"], 0.7), (make_cyclic, REAL["CyclicLR"], 0.5 + 0.75 * 0.5**3)],
)
def test_a_state_of_the_real_system_loads(
    make: Callable[[SGD], Scheduler], state: Mapping[str, Any], rate: float
) -> None:
    own = optimizer()
    schedule = make(own)
    schedule.load_state_dict(state)
    assert own.param_groups[0]["lr"].item() == pytest.approx(rate)
    assert schedule.state_dict().keys() == state.keys()


def all_of(module: Any, base: type[Any]) -> list[type[Scheduler]]:
    kinds: set[Any] = {kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base)}
    return sorted((kind for kind in kinds - {base} if not inspect.isabstract(kind)), key=lambda kind: kind.__name__)


SETTINGS: dict[str, Any] = {
    "learning_rate": 0.5,
    "val": 0.5,
    "initial_learning_rate": 0.5,
    "initial_val": 0.5,
    "end_learning_rate": 0.25,
    "end_val": 0.25,
    "total_iters": 6,
    "decay_rate": 0.5,
    "step_exponent": 2,
    "step_size": 2,
    "gamma": 0.5,
    "milestones": [2],
    "T_max": 5,
    "T_0": 4,
    "base_lr": 0.1,
    "base_val": 0.1,
    "max_lr": 0.9,
    "max_val": 0.9,
    "coefficient": 0.75,
    "learning_rates": [0.5, 0.25],
    "vals": [0.5, 0.25],
}


def make_any(kind: type[Scheduler], own: SGD) -> Scheduler:
    linear = lr_scheduler.LinearLR if issubclass(kind, lr_scheduler.LRScheduler) else weight_decay_scheduler.LinearWD
    parts: dict[str, Callable[[], Any]] = {
        "optimizer": lambda: own,
        "schedulers": lambda: [linear(own, 1.0, 0.5, 4), linear(own, 0.5, 0.1, 4)],
        "scheduler": lambda: linear(own, 1.0, 0.5, 4),
    }
    wanted = [name for name in inspect.signature(kind).parameters if name in parts or name in SETTINGS]
    return kind(**{name: parts[name]() if name in parts else SETTINGS[name] for name in wanted})


@pytest.mark.parametrize(
    "kind",
    [
        *all_of(lr_scheduler, lr_scheduler.LRScheduler),
        *all_of(weight_decay_scheduler, weight_decay_scheduler.WeightDecayScheduler),
    ],
)
def test_every_schedule_goes_on_from_what_it_saved(kind: type[Scheduler]) -> None:
    owns = [optimizer(), optimizer()]
    first, second = (make_any(kind, own) for own in owns)
    for _ in range(3):
        first.step()
    saved = first.state_dict()
    assert saved.keys() >= COMMON
    assert not {name for name in saved if issubclass(kind, lr_scheduler.LRScheduler) and name.endswith("_val")}
    second.load_state_dict(saved)
    for _ in range(3):
        key = first.param_group_key
        assert owns[1].param_groups[0][key].item() == owns[0].param_groups[0][key].item()
        first.step()
        second.step()


def test_general_names_load_too() -> None:
    """As releases of Waferbox saved them."""
    own = optimizer()
    make_linear(own).load_state_dict(
        {"initial_val": 1.0, "end_val": 0.0, "power": 1.0, "cycle": False, "total_iters": 10, "last_epoch": 3}
    )
    assert own.param_groups[0]["lr"].item() == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({**REAL["LinearLR"], "T_max": 3}, "'T_max'"),
        ({"learning_rate": 0.5, "last_epoch": 3}, "'learning_rate'"),
        ({name: value for name, value in REAL["LinearLR"].items() if name != "last_epoch"}, "no 'last_epoch'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(state: Mapping[str, Any], message: str) -> None:
    own = optimizer()
    schedule = make_linear(own)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == before


def test_other_factors_of_the_groups_are_refused() -> None:
    own = optimizer()
    scaled = lr_scheduler.ScalePerParamLR(own, lr_scheduler.LinearLR(own, 1.0, 0.0, 4))
    saved = scaled.state_dict()
    assert saved["lr_adjustment_scalars"] == [1.0]
    with pytest.raises(ValueError, match="these have"):
        scaled.load_state_dict({**saved, "lr_adjustment_scalars": [2.0]})


def test_the_decay_of_the_real_systems_adam_is_loaded() -> None:
    """There it has a name of its own, and weight_decay is 0."""
    theirs = Adam([torch.ones(2, requires_grad=True)], weight_decay=0.25).state_dict()
    theirs["param_groups"][0].update(weight_decay=0.0, l2_regularization_rate=0.25, correct_bias=True)
    own = Adam([torch.ones(2, requires_grad=True)])
    own.load_state_dict(theirs)
    assert own.param_groups[0]["weight_decay"] == 0.25


def test_groups_of_adamw_have_the_real_systems_settings() -> None:
    assert AdamW([torch.ones(2, requires_grad=True)]).param_groups[0]["l2_regularization_rate"] == 0.0

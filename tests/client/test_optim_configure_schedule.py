"""Learning rates as configuration files have them."""

from typing import Any

import pytest
import torch
from schedule_cases import optimizer

from cstorch.optim import SGD, configure_lr_scheduler, lr_scheduler


def rates(schedule: Any, epochs: int) -> list[float]:
    found = []
    for _ in range(epochs):
        found += schedule.get_last_lr()
        schedule.step()
    return found


@pytest.mark.parametrize("number", [0.5, 1, "5e-1"])
def test_a_number(number: Any) -> None:
    schedule = configure_lr_scheduler(optimizer(), number)
    assert type(schedule) is lr_scheduler.ConstantLR
    assert rates(schedule, 3) == [float(number)] * 3


@pytest.mark.parametrize("nothing", [None, [], {}])
def test_nothing(nothing: Any) -> None:
    assert configure_lr_scheduler(optimizer(), nothing) is None


LINEAR = {"scheduler": "Linear", "initial_learning_rate": 0.0, "end_learning_rate": 1.0, "total_iters": 4}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LINEAR, [0, 0.25, 0.5]),
        ({**LINEAR, "scheduler": "linearlr"}, [0, 0.25, 0.5]),
        ([LINEAR], [0, 0.25, 0.5]),
        ({"scheduler": "Constant", "learning_rate": 0.5, "steps": 3}, [0.5, 0.5]),
        ({"scheduler": "Exponential", "learning_rate": 0.5, "decay_steps": 1, "decay_rate": 0.5}, [0.5, 0.25]),
        ({"scheduler": "PiecewiseConstant", "values": [0.5, 0.25], "boundaries": [1]}, [0.5, 0.25]),
        ({"scheduler": "CyclicLR", "base_lr": 0.0, "max_lr": 1.0, "step_size_up": 2}, [0, 0.5, 1.0]),
        ({"scheduler": "MultiStep", "base_lr": 0.5, "gamma": 0.5, "milestones": [1], "total_iters": 9}, [0.5, 0.25]),
    ],
    ids=str,
)
def test_one_schedule(settings: Any, expected: list[float]) -> None:
    assert rates(configure_lr_scheduler(optimizer(), settings), len(expected)) == pytest.approx(expected)


def test_a_sequence() -> None:
    step = {"scheduler": "Step", "initial_learning_rate": 1.0, "step_size": 1, "gamma": 0.5, "steps": 2}
    schedule = configure_lr_scheduler(optimizer(), [LINEAR, step, {"scheduler": "constant", "learning_rate": 0.1}])
    assert isinstance(schedule, lr_scheduler.SequentialLR)
    assert schedule.milestones == [4, 6]
    assert rates(schedule, 8) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("name", ["chained", "ChainedLR"])
def test_a_chain(name: str) -> None:
    step = {"scheduler": "Step", "initial_learning_rate": 1.0, "step_size": 2, "gamma": 0.5, "main_scheduler": name}
    other = {"scheduler": "Multiplicative", "initial_learning_rate": 2.0, "coefficient": 0.5}
    schedule = configure_lr_scheduler(optimizer(), [step, other])
    assert isinstance(schedule, lr_scheduler.ChainedLR)
    assert rates(schedule, 3) == pytest.approx([1.0, 0.5, 0.125])


def test_a_scale_for_each_group() -> None:
    own = SGD([{"params": [torch.zeros(1, requires_grad=True)], "adjust_learning_rate": 0.5}], lr=9.0)
    schedule = configure_lr_scheduler(own, 0.5, adjust_learning_rate={"embedding": 0.5})
    assert isinstance(schedule, lr_scheduler.ScalePerParamLR)
    assert rates(schedule, 2) == [0.25, 0.25]


class Doubling(lr_scheduler.LRScheduler):
    def __init__(self, optimizer: SGD, start: float) -> None:
        self.start = start
        super().__init__(optimizer, None)

    def _get_closed_form_lr(self) -> torch.Tensor:
        return self.start * 2**self.last_epoch


def test_a_schedule_of_the_script() -> None:
    schedule = configure_lr_scheduler(optimizer(), {"scheduler": "Doubling", "start": 0.5})
    assert rates(schedule, 3) == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.1}, "needs the key 'scheduler'"),
        ({"scheduler": "Sawtooth"}, r"no learning rate schedule 'Sawtooth'.*StepLR"),
        (
            [{"scheduler": "Step"} | dict.fromkeys(("initial_learning_rate", "step_size", "gamma"), 1.0), LINEAR],
            "total_iters",
        ),
    ],
    ids=str,
)
def test_mistakes(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure_lr_scheduler(optimizer(), settings)


def test_a_setting_of_another_schedule_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="LinearLR has no setting 'alpha': it is left out"):
        schedule = configure_lr_scheduler(optimizer(), {**LINEAR, "alpha": 0.1})
    assert rates(schedule, 3) == [0, 0.25, 0.5]

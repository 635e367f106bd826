"""Training with schedules, their sequences, tags and state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from schedule_cases import optimizer

from cstorch.optim import SGD, lr_scheduler
from cstorch.optim.lr_scheduler import LRScheduler


@pytest.mark.parametrize(
    ("make", "make_torch"),
    [
        (
            lambda o: lr_scheduler.StepLR(o, 1.0, 3, 0.5),
            lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        ),
        (
            lambda o: lr_scheduler.MultiStepLR(o, 1.0, 0.3, [2, 9]),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 9], 0.3),
        ),
        (
            lambda o: lr_scheduler.PolynomialLR(o, 1.0, 0.0, 12, power=2.0),
            lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 12, power=2.0),
        ),
        (
            lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 12),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, 12),
        ),
    ],
)
def test_training_equals_torch_with_its_scheduler(
    make: Callable[[SGD], LRScheduler],
    make_torch: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> None:
    start = torch.linspace(-1, 1, 6)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    our_optimizer = SGD([ours], lr=1.0, momentum=0.5)
    their_optimizer = torch.optim.SGD([theirs], lr=1.0, momentum=0.5)
    our_scheduler, their_scheduler = make(our_optimizer), make_torch(their_optimizer)
    for _ in range(20):
        for p, o, s in ((ours, our_optimizer, our_scheduler), (theirs, their_optimizer, their_scheduler)):
            o.zero_grad()
            (0.05 * p**2).sum().backward()
            o.step()
            s.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sequence() -> None:
    own = optimizer()
    warmup = lr_scheduler.LinearLR(own, 0.0, 1.0, 4)
    decay = lr_scheduler.LinearLR(own, 1.0, 0.0, 10)
    rest = lr_scheduler.ConstantLR(own, 0.125)
    sequence = lr_scheduler.SequentialLR(own, [warmup, decay, rest], [4, 9])
    values = []
    for _ in range(12):
        values.append(own.param_groups[0]["lr"].item())
        own.step()
        sequence.step()
    expected = [0, 0.25, 0.5, 0.75, 1.0, 0.9, 0.8, 0.7, 0.6, 0.125, 0.125, 0.125]
    assert values == pytest.approx(expected)
    assert own.schedulers == [sequence]
    assert decay.last_epoch.item() == 8


def test_the_optimizer_uses_the_value_of_its_own_step() -> None:
    """The optimizer evaluates its schedules by itself, whatever stands in the groups."""
    p = torch.zeros(1, requires_grad=True)
    own = SGD([p], lr=9.0)
    scheduler = lr_scheduler.LinearLR(own, 1.0, 0.0, 4)
    p.grad = -torch.ones(1)
    own.param_groups[0]["lr"] = 77.0
    own.step()
    assert p.item() == pytest.approx(1.0)
    scheduler.step()
    own.step()
    assert p.item() == pytest.approx(1.75)


class Custom(LRScheduler):
    def __init__(self, optimizer: SGD, base: float) -> None:
        self.base = base
        super().__init__(optimizer, total_iters=10)

    def _get_closed_form_lr(self) -> torch.Tensor:
        return torch.where(self.last_epoch < 2, self.base * (self.last_epoch + 1), self.base * 10)


def test_custom_schedule() -> None:
    own = optimizer()
    scheduler = Custom(own, 0.1)
    values = []
    for _ in range(4):
        values += scheduler.get_last_lr()
        scheduler.step()
    assert values == pytest.approx([0.1, 0.2, 1.0, 1.0])


def test_state_dict_round_trip() -> None:
    first = lr_scheduler.LinearLR(optimizer(), 1.0, 0.0, 10)
    for _ in range(3):
        first.step()
    own = optimizer()
    second = lr_scheduler.LinearLR(own, 5.0, 4.0, 7)
    counter = second.last_epoch
    second.load_state_dict(first.state_dict())
    assert second.last_epoch is counter
    assert second.get_last_lr() == first.get_last_lr() == pytest.approx([0.7])
    assert own.param_groups[0]["lr"].item() == pytest.approx(0.7)


def test_state_dict_of_a_sequence() -> None:
    def make() -> lr_scheduler.SequentialLR:
        own = optimizer()
        parts: list[LRScheduler] = [lr_scheduler.LinearLR(own, 0.0, 1.0, 3), lr_scheduler.LinearLR(own, 1.0, 0.0, 5)]
        return lr_scheduler.SequentialLR(own, parts, [3])

    first, second = make(), make()
    for _ in range(5):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        assert second.get_last_lr() == first.get_last_lr()
        first.step()
        second.step()


def test_param_group_tags() -> None:
    a, b, c = (torch.zeros(1, requires_grad=True) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [a], "tags": "head"}, {"params": [b], "tags": ["body"]}, {"params": [c]}]
    own = SGD(groups, lr=9.0)
    lr_scheduler.ConstantLR(own, 0.5, param_group_tags="head")
    lr_scheduler.ConstantLR(own, 0.25, param_group_tags=["body", None])
    assert [float(group["lr"]) for group in own.param_groups] == [0.5, 0.25, 0.25]


def test_errors() -> None:
    p = torch.zeros(1, requires_grad=True)
    with pytest.raises(TypeError, match=r"cstorch\.optim\.Optimizer, not SGD"):
        lr_scheduler.ConstantLR(torch.optim.SGD([p], lr=1.0), 0.1)
    with pytest.raises(ValueError, match="total_iters must be at least 1"):
        lr_scheduler.LinearLR(optimizer(), 1.0, 0.0, 0)
    with pytest.raises(NotImplementedError, match="_get_closed_form_lr"):
        LRScheduler(optimizer(), 3)
    own = optimizer()
    with pytest.raises(ValueError, match="2 schedulers need 1 milestones"):
        lr_scheduler.SequentialLR(own, [lr_scheduler.ConstantLR(own, 0.1), lr_scheduler.ConstantLR(own, 0.2)], [])

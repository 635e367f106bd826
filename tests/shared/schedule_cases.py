"""Every schedule of a learning rate or weight decay, with the values that it must have."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler as theirs

from cstorch.optim import SGD, Optimizer, lr_scheduler, weight_decay_scheduler
from cstorch.optim.scheduler import Scheduler

EPOCHS = 26
Values = Callable[[int], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule, its arguments, which are the same for a learning rate and a weight decay, and its values."""

    form: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    values: Values

    def __str__(self) -> str:
        return f"{self.form}{self.arguments}{self.keywords or ''}"

    def learning_rate(self, optimizer: Optimizer) -> Scheduler:
        name = self.form if hasattr(lr_scheduler, self.form) else f"{self.form}LR"
        return getattr(lr_scheduler, name)(optimizer, *self.arguments, **self.keywords)

    def weight_decay(self, optimizer: SGD) -> Scheduler:
        return getattr(weight_decay_scheduler, f"{self.form}WD")(optimizer, *self.arguments, **self.keywords)


def optimizer(lr: float = 9.0, device: Any = None) -> SGD:
    return SGD([torch.zeros(2, device=device).requires_grad_()], lr=lr)


def of_torch(make: Callable[[torch.optim.Optimizer], Any], lr: float = 1.0) -> Values:
    """Returns the values that torch's scheduler sets in each epoch."""

    def values(epochs: int) -> list[float]:
        own = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        scheduler = make(own)
        found = []
        for epoch in range(epochs):
            found.append(own.param_groups[0]["lr"])
            own.step()
            if epoch < epochs - 1:  # OneCycleLR raises an error for more steps than it has.
                scheduler.step()
        return found

    return values


def formula(form: Callable[[int], float]) -> Values:
    return lambda epochs: [form(epoch) for epoch in range(epochs)]


def cycled(e: int) -> float:
    return 0.1 + 0.9 * (1 - e / (8 * math.ceil((e + 1) / 8)))


def one_cycle(**settings: Any) -> Case:
    """Returns the case of torch's schedule, whose last value stays after its end, where torch raises an error."""
    length = 20

    def values(epochs: int) -> list[float]:
        make = of_torch(
            lambda o: theirs.OneCycleLR(
                o, 2.0, total_steps=length, cycle_momentum=False, div_factor=4.0, final_div_factor=50.0, **settings
            )
        )
        return make(length) + [0.5 / 50.0] * (epochs - length)

    anneal = {"anneal_strategy": settings.get("anneal_strategy", "cos")}
    return Case(
        form="OneCycle",
        arguments=(0.5, 2.0, length),
        keywords={"final_div_factor": 50.0, **settings, **anneal},
        values=values,
    )


def cyclic(**settings: Any) -> Case:
    return Case(
        form="Cyclic",
        arguments=(0.1, 1.0),
        keywords=settings,
        values=of_torch(lambda o: theirs.CyclicLR(o, 0.1, 1.0, cycle_momentum=False, **settings)),
    )


CASES = [
    Case(form="Constant", arguments=(0.5,), values=formula(lambda e: 0.5)),
    Case(form="Linear", arguments=(1.0, 0.25, 12), values=of_torch(lambda o: theirs.LinearLR(o, 1.0, 0.25, 12))),
    Case(form="Linear", arguments=(1.0, 0.1, 8), keywords={"cycle": True}, values=formula(cycled)),
    Case(
        form="Polynomial",
        arguments=(1.0, 0.0, 12),
        keywords={"power": 2.0},
        values=of_torch(lambda o: theirs.PolynomialLR(o, 12, power=2.0)),
    ),
    Case(
        form="Polynomial",
        arguments=(1.0, 0.1, 8, 2.5),
        values=formula(lambda e: 0.1 + 0.9 * (1 - min(e, 8) / 8) ** 2.5),
    ),
    Case(form="Exponential", arguments=(1.0, 1, 0.9), values=of_torch(lambda o: theirs.ExponentialLR(o, 0.9))),
    Case(form="Exponential", arguments=(0.5, 4, 0.1), values=formula(lambda e: 0.5 * 0.1 ** (e / 4))),
    Case(form="Exponential", arguments=(0.5, 4, 0.1, True), values=formula(lambda e: 0.5 * 0.1 ** (e // 4))),
    Case(
        form="InverseExponentialTimeDecay",
        arguments=(0.5, 2, 10, 0.3),
        values=formula(lambda e: 0.5 / (1 + 0.3 * e**2 / 10)),
    ),
    Case(
        form="InverseExponentialTimeDecay",
        arguments=(0.5, 2, 10, 0.3, True),
        values=formula(lambda e: 0.5 / (1 + 0.3 * (e**2 // 10))),
    ),
    Case(
        form="InverseSquareRootDecay",
        arguments=(0.5, 2.0, 6),
        values=formula(lambda e: 0.5 * 2.0 / math.sqrt(max(6, e))),
    ),
    Case(form="InverseSquareRootDecay", values=formula(lambda e: 1 / math.sqrt(max(1, e)))),
    Case(
        form="CosineDecay",
        arguments=(1.0, 0.2, 9),
        values=formula(lambda e: 0.2 + 0.4 * (1 + math.cos(math.pi * min(e, 9) / 9))),
    ),
    Case(
        form="CosineAnnealing",
        arguments=(1.0, 9, 0.2),
        values=of_torch(lambda o: theirs.CosineAnnealingLR(o, 9, 0.2)),
    ),
    Case(
        form="CosineAnnealingWarmRestarts",
        arguments=(1.0, 9),
        keywords={"eta_min": 0.2},
        values=of_torch(lambda o: theirs.CosineAnnealingWarmRestarts(o, 9, eta_min=0.2)),
    ),
    Case(form="Step", arguments=(1.0, 3, 0.5), values=of_torch(lambda o: theirs.StepLR(o, 3, 0.5))),
    Case(form="MultiStep", arguments=(1.0, 0.3, [2, 9]), values=of_torch(lambda o: theirs.MultiStepLR(o, [2, 9], 0.3))),
    Case(
        form="PiecewiseConstant",
        arguments=([1.0, 0.5, 0.125], [4, 9]),
        values=formula(lambda e: [1.0, 0.5, 0.125][(e >= 4) + (e >= 9)]),
    ),
    Case(form="Lambda", arguments=(0.5,), values=formula(lambda e: (0.5 * e / 30) * (0.5 * 0.95**e))),
    Case(
        form="Multiplicative",
        arguments=(1.0, 0.9),
        values=of_torch(lambda o: theirs.MultiplicativeLR(o, lambda e: 0.9)),
    ),
    cyclic(step_size_up=5),
    cyclic(step_size_up=3, step_size_down=6, mode="triangular2"),
    cyclic(step_size_up=4, step_size_down=2, mode="exp_range", gamma=0.9),
    one_cycle(),
    one_cycle(pct_start=0.4, anneal_strategy="linear"),
    one_cycle(pct_start=0.4, three_phase=True),
    one_cycle(pct_start=0.0),
]

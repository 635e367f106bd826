"""Schedules of sparsities and drop fractions, and of the steps that update masks.

They are evaluated inside the traced step, on a step counter that is a tensor: in tensor operations, without branches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch

UpdateLike: TypeAlias = Mapping[str, Any] | Callable[[torch.Tensor], torch.Tensor] | None


class HyperParameterSchedule(ABC):
    """The base class of schedules: a number for each step.

    It is called once in every step, with the number of updates of the weights so far (int64, rank 0) and whether masks
    are updated in the step (bool, rank 0), and returns a rank 0 float tensor.
    """

    @abstractmethod
    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor: ...

    def visit_state(self, f: Callable[[torch.Tensor], torch.Tensor | None]) -> None:  # noqa: B027 (most have none)
        """Calls a function with each state tensor; what it returns takes the tensor's place, unless it is None.

        Args:
            f: The function.
        """


ScheduleLike: TypeAlias = (
    float
    | Sequence[float]
    | Mapping[str, Any]
    | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    | HyperParameterSchedule
)


@dataclass(frozen=True, slots=True)
class Constant(HyperParameterSchedule):
    """A constant.

    Args:
        value: The number.
    """

    value: float

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        return torch.full_like(step, self.value, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Linear(HyperParameterSchedule):
    """`init + slope * step`.

    Args:
        init: The number at step 0.
        slope: The difference of two steps.
    """

    init: float
    slope: float

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        return self.init + self.slope * step


@dataclass(frozen=True, slots=True)
class Exp(HyperParameterSchedule):
    """`final + (init - final) * exp(gamma * step)`.

    Args:
        init: The number at step 0.
        gamma: The rate, not positive.
        final: The number that is approached.
    """

    init: float
    gamma: float
    final: float = 1.0

    def __post_init__(self) -> None:
        if self.gamma > 0:
            raise ValueError(f"gamma must not be positive, or the value runs away from `final`; got {self.gamma}")

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        return self.final + (self.init - self.final) * torch.exp(self.gamma * step)


@dataclass(frozen=True, slots=True)
class Power(HyperParameterSchedule):
    """`init * beta ** step`.

    Args:
        init: The number at step 0.
        beta: The factor of each step, positive.
    """

    init: float
    beta: float

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be positive, got {self.beta}")

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        return self.init * torch.exp(math.log(self.beta) * step)


@dataclass(frozen=True, slots=True)
class Cosine(HyperParameterSchedule):
    """A cosine from `init` to `minimum` and back.

    Args:
        init: The number at step 0.
        half_period: The number of steps to the minimum.
        minimum: The lowest number.
    """

    init: float
    half_period: float
    minimum: float = 0.0

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        middle, amplitude = (self.init + self.minimum) / 2, (self.init - self.minimum) / 2
        return middle + amplitude * torch.cos(step * (math.pi / self.half_period))


class Cycling(HyperParameterSchedule):
    """Numbers in turn, one for each update of the masks; between two updates, that of the next. State: its `index`.

    Args:
        values: The numbers, at least one.
    """

    def __init__(self, values: Sequence[float]) -> None:
        if not values:
            raise ValueError("Cycling takes at least one value")
        self.values = tuple(values)
        self.index = torch.zeros((), dtype=torch.int64)

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        value = torch.full_like(step, self.values[0], dtype=torch.float32)
        for number, other in enumerate(self.values[1:], start=1):
            value = torch.where(self.index == number, other, value)
        self.index.copy_(torch.where(is_update_step, self.index + 1, self.index) % len(self.values))
        return value

    def visit_state(self, f: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        new = f(self.index)
        if new is not None:
            self.index = new


@dataclass(frozen=True, slots=True)
class Lambda(HyperParameterSchedule):
    """The result of a function.

    Args:
        fn: Called as `fn(step, is_update_step)`.
    """

    fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, step: torch.Tensor, is_update_step: torch.Tensor) -> torch.Tensor:
        return self.fn(step, is_update_step)


_SCHEDULES: Mapping[str, type[HyperParameterSchedule]] = {
    schedule.__name__.lower(): schedule for schedule in (Constant, Linear, Exp, Power, Cosine, Cycling, Lambda)
}


def make_schedule(value: ScheduleLike) -> HyperParameterSchedule:
    """Makes a schedule from its configuration.

    Args:
        value: A number; a list, whose numbers come in turn; a function; or a dictionary with the lower-case name of a
            class under "type" and its arguments.

    Raises:
        TypeError: The class does not take an argument, or the value has another type.
        ValueError: The type is unknown.
    """
    if isinstance(value, HyperParameterSchedule):
        return value
    if isinstance(value, (int, float)):
        return Constant(float(value))
    if isinstance(value, Mapping):
        settings = dict(value)
        kind = str(settings.pop("type", "")).lower()
        if kind not in _SCHEDULES:
            raise ValueError(f'a schedule\'s "type" is one of {", ".join(_SCHEDULES)}, not {kind!r}')
        return _SCHEDULES[kind](**settings)
    if isinstance(value, (list, tuple)):
        return Cycling(value)
    if callable(value):
        return Lambda(value)
    raise TypeError(f"a schedule is a number, a list, a dictionary or a function, not {type(value).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FreqSchedule:
    """Every `freq` steps from step `start` on, before step `stop`. Steps count from 0.

    Args:
        freq: The distance of two steps, at least 1.
        start: The first step.
        stop: The end, exclusive; None: none.
    """

    freq: int = 1
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.freq < 1 or self.start < 0:
            raise ValueError(f"freq must be at least 1 and start at least 0, got {self.freq} and {self.start}")

    def __call__(self, step: torch.Tensor) -> torch.Tensor:
        is_update = ((step - self.start) % self.freq == 0) & (step >= self.start)
        return is_update if self.stop is None else is_update & (step < self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """Given steps.

    Args:
        steps: The steps, from 0.
    """

    steps: Sequence[int]

    def __call__(self, step: torch.Tensor) -> torch.Tensor:
        return reduce(torch.logical_or, (step == number for number in self.steps), torch.zeros_like(step) != 0)


def make_update_schedule(update: UpdateLike) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that says whether a step updates masks.

    Args:
        update: {"freq", "start", "stop"}, {"steps"} or a function of the step; None: all steps.
    """
    if update is None:
        return FreqSchedule()
    if callable(update):
        return update
    return ListSchedule(**update) if "steps" in update else FreqSchedule(**update)

"""Schedules of any setting of a parameter group, as closed forms of a step counter that is computed in the step.

The classes here hold the formulas and are abstract: `lr_scheduler` and `weight_decay_scheduler` derive from each one
the class that writes the learning rate, or the weight decay. e is the epoch, `last_epoch`: the number of steps so far.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from cstorch.optim.scheduler_base import CompositeScheduler, Renamed, Scheduler, Tags, check_positive


def _power(base: float | torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Returns a power (float32). In float64, as a high power multiplies the rounding of its base."""
    return torch.pow(base, exponent.double()).float()


# --- The schedules that are one formula of the epoch ------------------------------------------------------------------


class ConstantScheduler(Scheduler):
    """A constant: `val` at each epoch.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        val: The value.
        total_iters: The number of steps of the schedule, kept as an attribute; the value stays after them.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        val: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        self.val = val
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    @property
    def initial_val(self) -> float:
        """val."""
        return self.val

    def _get_closed_form(self) -> torch.Tensor:
        return torch.full_like(self.last_epoch, self.val, dtype=torch.float32)


class PolynomialScheduler(Scheduler):
    """A polynomial decay: `(initial_val - end_val) * (1 - e / total_iters)^power + end_val` at epoch e.

    With `cycle` the decay starts again at each multiple of `total_iters`, stretched over the whole range so far: the
    base of the power is `1 - e / (total_iters * ceil((e + 1) / total_iters))`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        end_val: The value from epoch `total_iters` on, unless `cycle` is true.
        total_iters: The number of steps of the decay, at least 1.
        power: The exponent.
        cycle: Whether the decay starts again after `total_iters` steps.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_iters` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.end_val = end_val
        self.power = power
        self.cycle = cycle
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        epoch = self.last_epoch.double()  # the difference from 1 is small in the end
        if self.cycle:
            remaining = 1 - epoch / (self.total_iters * torch.ceil((epoch + 1) / self.total_iters))
        else:
            remaining = 1 - epoch / self.total_iters
        if self.power != 1:
            remaining = torch.pow(remaining, self.power)
        value = (remaining * (self.initial_val - self.end_val) + self.end_val).float()
        return value if self.cycle else torch.where(epoch >= self.total_iters, self.end_val, value)


class LinearScheduler(PolynomialScheduler):
    """A linear decay, or rise: `initial_val + (end_val - initial_val) * e / total_iters` at epoch e, then `end_val`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        end_val: The value from epoch `total_iters` on, unless `cycle` is true.
        total_iters: The number of steps of the decay, at least 1.
        cycle: Whether the decay starts again after `total_iters` steps, as in `PolynomialScheduler`.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_iters` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_val, end_val, total_iters, 1.0, cycle, param_group_tags)


class ExponentialScheduler(Scheduler):
    """An exponential decay: `initial_val * decay_rate^(e / total_iters)` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        total_iters: The number of steps in which the value is multiplied by `decay_rate` once, at least 1.
        decay_rate: The factor.
        staircase: Whether the exponent is rounded down, so that the value falls in steps.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_iters` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        exponent = self.last_epoch.double() / self.total_iters
        if self.staircase:
            exponent = torch.floor(exponent)
        return _power(self.decay_rate, exponent) * self.initial_val


class StepScheduler(Scheduler):
    """A decay in equal steps: `initial_val * gamma^floor(e / step_size)` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        step_size: The number of epochs between two decays, at least 1.
        gamma: The factor of each decay.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `step_size` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("step_size", step_size)
        self.initial_val = initial_val
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        return _power(self.gamma, self.last_epoch // self.step_size) * self.initial_val


class MultiStepScheduler(Scheduler):
    """A decay at given epochs: `initial_val * gamma^n` at epoch e, with n the number of milestones that are at most e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        gamma: The factor of each decay.
        milestones: The epochs of the decays, in any order.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_val = initial_val
        self.gamma = gamma
        self.milestones = sorted(milestones)
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        value = torch.full_like(self.last_epoch, self.initial_val, dtype=torch.float32)
        for passed, milestone in enumerate(self.milestones, start=1):
            value = torch.where(self.last_epoch >= milestone, self.initial_val * self.gamma**passed, value)
        return value


# --- The schedules that decay as the inverse of a power of the epoch --------------------------------------------------


class InverseExponentialTimeDecayScheduler(Scheduler):
    """An inverse decay: `initial_val / (1 + decay_rate * e^step_exponent / total_iters)` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        step_exponent: The exponent of the epoch.
        total_iters: The number of steps that `decay_rate` is for, at least 1.
        decay_rate: The rate of the decay.
        staircase: Whether `e^step_exponent / total_iters` is rounded down.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_iters` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.step_exponent = step_exponent
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        time = torch.pow(self.last_epoch.to(torch.float32), self.step_exponent) / self.total_iters
        if self.staircase:
            time = torch.floor(time)
        return self.initial_val / (1 + time * self.decay_rate)


class InverseSquareRootDecayScheduler(Scheduler):
    """An inverse square root: `initial_val * scale / sqrt(max(warmup_steps, e))` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The first factor.
        scale: The second factor.
        warmup_steps: The number of epochs before the decay, at least 1.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `warmup_steps` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("warmup_steps", warmup_steps)
        self.initial_val = initial_val
        self.scale = scale
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        steps = self.last_epoch.to(torch.float32).clamp(min=self.warmup_steps)
        return self.initial_val * self.scale / steps.sqrt()


# --- The schedules that follow a cosine -------------------------------------------------------------------------------


class CosineDecayScheduler(Scheduler):
    """A cosine from `initial_val` to `end_val`.

    `end_val + (initial_val - end_val) * (1 + cos(pi * min(e, total_iters) / total_iters)) / 2` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        end_val: The value from epoch `total_iters` on.
        total_iters: The number of steps of the decay, at least 1.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_iters` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.end_val = end_val
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = torch.clamp(self.last_epoch, max=self.total_iters) / self.total_iters
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.end_val)) + self.end_val


class CosineAnnealingScheduler(Scheduler):
    """A cosine that falls for `T_max` epochs, rises for as many, and so on.

    `eta_min + (initial_val - eta_min) * (1 + cos(pi * e / T_max)) / 2` at epoch e.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        T_max: The number of epochs of one fall, at least 1.
        eta_min: The lowest value.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `T_max` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("T_max", T_max)
        self.initial_val = initial_val
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = self.last_epoch / self.T_max
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.eta_min)) + self.eta_min


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """A cosine that falls for `T_0` epochs and starts again, as torch has it.

    `eta_min + (initial_val - eta_min) * (1 + cos(pi * (e mod T_0) / T_0)) / 2` at epoch e. Release 2.10 of the original
    keeps the value from epoch `T_0` on; torch and this class start again.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        T_0: The number of epochs of one fall, at least 1.
        T_mult: The factor between the lengths of two falls. Only 1 is supported.
        eta_min: The lowest value.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `T_0` is less than 1, or `T_mult` is not 1.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("T_0", T_0)
        if T_mult != 1:
            raise ValueError(
                f"T_mult must be 1, not {T_mult}: all cycles are of one length. For cycles that become longer put one "
                "CosineAnnealingLR after the other into a SequentialLR"
            )
        self.initial_val = initial_val
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = (self.last_epoch % self.T_0) / self.T_0
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.eta_min)) + self.eta_min


# --- The schedules that rise and fall ---------------------------------------------------------------------------------


class CyclicScheduler(Scheduler):
    """A triangle wave from `base_val` to `max_val` and back, as torch has it.

    The height above `base_val` is scaled by the mode: "triangular" leaves it, "triangular2" halves it in each cycle,
    "exp_range" multiplies it by `gamma^e` at epoch e. A subclass overrides `set_scale_fn` for another scale.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        base_val: The lowest value, which is also that of epoch 0.
        max_val: The highest value.
        step_size_up: The number of epochs of a rise, at least 1.
        step_size_down: The number of epochs of a fall, at least 1; None: `step_size_up`.
        mode: "triangular", "triangular2" or "exp_range".
        gamma: The factor for each epoch in mode "exp_range".
        scale_mode: Whether the scale is a function of the "cycle" or of the "iterations".
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: A step size is less than 1, or a mode is unknown.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_val: float,
        max_val: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: Tags = None,
    ) -> None:
        self.base_val = base_val
        self.max_val = max_val
        self.step_size_up = step_size_up
        self.step_size_down = step_size_up if step_size_down is None else step_size_down
        check_positive("step_size_up", self.step_size_up)
        check_positive("step_size_down", self.step_size_down)
        if scale_mode not in ("cycle", "iterations"):
            raise ValueError(f"scale_mode must be 'cycle' or 'iterations', not {scale_mode!r}")
        self.mode = mode
        self.gamma = gamma
        self.scale_mode = scale_mode
        self.set_scale_fn()  # raises for an unknown mode
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    @property
    def initial_val(self) -> float:
        """base_val."""
        return self.base_val

    def set_scale_fn(self) -> Callable[[torch.Tensor], torch.Tensor | float]:
        """Returns the function of the cycle's number (from 1), or of the epoch if `scale_mode` is "iterations".

        Raises:
            ValueError: The mode is unknown.
        """
        match self.mode:
            case "triangular":
                return lambda cycle: 1.0
            case "triangular2":
                return lambda cycle: torch.pow(0.5, (cycle - 1).to(torch.float32))
            case "exp_range":
                self.scale_mode = "iterations"
                return lambda epoch: _power(self.gamma, epoch)
        raise ValueError(f"mode must be 'triangular', 'triangular2' or 'exp_range', not {self.mode!r}")

    def _get_closed_form(self) -> torch.Tensor:
        scale = self.set_scale_fn()
        epoch, length = self.last_epoch, self.step_size_up + self.step_size_down
        place = epoch % length
        rising, falling = place / self.step_size_up, (length - place) / self.step_size_down
        height = torch.where(place <= self.step_size_up, rising, falling) * (self.max_val - self.base_val)
        counted = epoch if self.scale_mode == "iterations" else epoch // length + 1
        return height * scale(counted) + self.base_val


class OneCycleScheduler(Scheduler):
    """One rise from `initial_val` to `max_val`, then one fall to `initial_val / final_div_factor`, as torch has it.

    With `three_phase` the fall to `initial_val` takes as many steps as the rise, and the rest of the steps fall to the
    last value. The value stays there after `total_steps`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        max_val: The highest value.
        total_steps: The number of steps of the cycle, at least 1.
        pct_start: The share of the steps in which the value rises, from 0 to 1.
        final_div_factor: `initial_val` divided by the last value.
        three_phase: Whether the fall has two phases.
        anneal_strategy: The form of each phase: "cos" or "linear".
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: `total_steps` is less than 1, `pct_start` is not in [0, 1], or the strategy is unknown.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        max_val: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_steps", total_steps)
        if not 0 <= pct_start <= 1:
            raise ValueError(f"pct_start must be at least 0 and at most 1, not {pct_start}")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy must be 'cos' or 'linear', not {anneal_strategy!r}")
        self.initial_val = initial_val
        self.max_val = max_val
        self.total_steps = total_steps
        self.pct_start = pct_start
        self.final_div_factor = final_div_factor
        self.three_phase = three_phase
        self.anneal_strategy = anneal_strategy
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        last = self.initial_val / self.final_div_factor
        top = self.pct_start * self.total_steps - 1
        ends, values = [top, self.total_steps - 1.0], [self.initial_val, self.max_val, last]
        if self.three_phase:
            ends.insert(1, 2 * top)
            values.insert(2, self.initial_val)
        value = torch.full_like(self.last_epoch, last, dtype=torch.float32)
        phases = list(zip([0.0, *ends], ends, values, values[1:], strict=False))
        for begin, end, start, stop in reversed(phases):
            if end > begin:
                value = torch.where(self.last_epoch <= end, self._between(begin, end, start, stop), value)
        return value

    def _between(self, begin: float, end: float, start: float, stop: float) -> torch.Tensor:
        progress = (self.last_epoch - begin) / (end - begin)
        if self.anneal_strategy == "linear":
            return progress * (stop - start) + start
        return (1 + torch.cos(progress * math.pi)) * ((start - stop) / 2) + stop


# --- The schedules that a subclass completes with functions of the epoch ----------------------------------------------

Function = Callable[[torch.Tensor], torch.Tensor | float]


class LambdaScheduler(Scheduler):
    """The product of `initial_val * f(e)` over the functions f that `set_value_lambda` returns, at epoch e.

    A subclass overrides `set_value_lambda`, or, of a schedule of the learning rate, its older name `set_lr_lambda`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The factor of each function.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, param_group_tags: Tags = None) -> None:
        functions = [value for value in (initial_val, param_group_tags) if callable(value)]
        if functions or not isinstance(initial_val, numbers.Number | torch.Tensor):
            given = functions[0] if functions else initial_val
            raise TypeError(
                f"{type(self).__name__} takes the first value as a number, not {given!r}, and its functions from "
                "`set_value_lambda`: derive a class whose `set_value_lambda(self)` returns a list such as "
                "`[lambda epoch: 0.95**epoch]`"
            )
        self.initial_val = initial_val
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Sequence[Function]:
        """Returns the functions of the epoch (int64, rank 0). To be overridden."""
        return [lambda epoch: epoch / 30, lambda epoch: torch.pow(0.95, epoch.to(torch.float32))]

    def _get_closed_form(self) -> torch.Tensor:
        value = torch.ones_like(self.last_epoch, dtype=torch.float32)
        for function in self.set_value_lambda():
            value = value * (self.initial_val * function(self.last_epoch))
        return value


class MultiplicativeScheduler(Scheduler):
    """A geometric sequence: `initial_val * coefficient^e` at epoch e.

    A subclass that overrides `set_value_lambda`, or, of a schedule of the learning rate, its older name
    `set_lr_lambda`, computes the coefficient from the epoch.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_val: The value at epoch 0.
        coefficient: The factor of each epoch.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_val: float, coefficient: float, param_group_tags: Tags = None
    ) -> None:
        self.initial_val = initial_val
        self.coefficient = coefficient
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Function:
        """Returns the function of the epoch that gives the coefficient."""
        return lambda epoch: float(self.coefficient)

    def _get_closed_form(self) -> torch.Tensor:
        coefficient = self.set_value_lambda()(self.last_epoch)
        return _power(coefficient, self.last_epoch) * self.initial_val


# --- One schedule after the other -------------------------------------------------------------------------------------


class SequentialScheduler(CompositeScheduler):
    """Schedules that follow each other: `schedulers[i]` before epoch `milestones[i]`, then the next one.

    Each schedule starts at its own epoch 0.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        schedulers: The schedules, all of this optimizer. They are no longer stepped on their own.
        milestones: The epochs at which the next schedule begins, increasing, one fewer than schedules.
        last_epoch: The epoch before the first one.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: The numbers do not fit, `milestones` decreases, or a schedule has another optimizer.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    _milestones = Renamed("milestones")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[Scheduler],
        milestones: list[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"{len(schedulers)} schedulers need {max(len(schedulers) - 1, 1)} milestones in between, "
                f"not {len(milestones)}"
            )
        if list(milestones) != sorted(milestones):
            raise ValueError(f"milestones must increase: {list(milestones)}")
        self.milestones = list(milestones)
        super().__init__(optimizer, schedulers, last_epoch, param_group_tags)

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        first, *others = self._schedulers
        first._advance(by)
        for scheduler, milestone in zip(others, self.milestones, strict=True):
            scheduler._advance((self.last_epoch > milestone).to(torch.int64) * by)

    def _get_closed_form(self) -> torch.Tensor:
        value = self._schedulers[0].get()
        for scheduler, milestone in zip(self._schedulers[1:], self.milestones, strict=True):
            value = torch.where(self.last_epoch < milestone, value, scheduler.get())
        return value


class PiecewiseConstantScheduler(SequentialScheduler):
    """Constants that follow each other: `vals[i]` before epoch `milestones[i]`, then the next one.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        constant_cls: The class of the constant schedules.
        vals: The values.
        milestones: The epochs at which the next value begins, increasing, one fewer than values.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: The numbers do not fit, or `milestones` decreases.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constant_cls: type[Scheduler],
        vals: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        constants = [constant_cls(optimizer, val) for val in vals]  # type: ignore[arg-type]
        super().__init__(optimizer, constants, milestones, param_group_tags=param_group_tags)


# --- Schedules multiplied, and schedules scaled -----------------------------------------------------------------------


class ChainedScheduler(CompositeScheduler):
    """The value of the first schedule, multiplied by `value / initial_val` of each other one.

    Args:
        schedulers: The schedules, all of one optimizer. They are no longer stepped on their own.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: The list is empty, optimizers differ, or a schedule after the first has no initial value.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    def __init__(self, schedulers: list[Scheduler], param_group_tags: Tags = None) -> None:
        if not schedulers:
            raise ValueError("a chain needs at least one scheduler")
        for scheduler in schedulers[1:]:
            if not getattr(scheduler, "initial_val", 0):
                raise ValueError(
                    f"{type(scheduler).__name__} has no initial value, or 0: it can only be the first of a chain, "
                    "as the others are divided by theirs"
                )
        super().__init__(schedulers[0].optimizer, schedulers, param_group_tags=param_group_tags)

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        for scheduler in self._schedulers:
            scheduler._advance(by)

    def _get_closed_form(self) -> torch.Tensor:
        first, *others = self._schedulers
        value = first.get()
        for scheduler in others:
            value = value * (scheduler.get() / scheduler.initial_val)  # type: ignore[attr-defined]
        return value


class ScalePerParamScheduler(CompositeScheduler):
    """A schedule whose value is multiplied, for each parameter group, by the group's "adjust_learning_rate".

    A group without that key has the factor 1.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        scheduler: The schedule to scale, of this optimizer.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: The schedule has another optimizer, or scales groups itself.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
    """

    has_values_of_groups = True
    _scalars_name: ClassVar[str] = "adjustment_scalars"  # by which they are saved

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, param_group_tags: Tags = None) -> None:
        super().__init__(optimizer, [scheduler], param_group_tags=param_group_tags)

    @property
    def adjustment_scalars(self) -> list[float]:
        """The factor of each parameter group."""
        return [_factor(group) for group in self.optimizer.param_groups]

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        self._schedulers[0]._advance(by)

    def _get_closed_form(self) -> torch.Tensor:
        return self._schedulers[0].get()

    def _parts_dict(self) -> dict[str, Any]:
        return {"_scheduler": self._schedulers[0].state_dict(), self._scalars_name: self.adjustment_scalars}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        own = dict(state_dict)
        scalars = own.pop(self._scalars_name, self.adjustment_scalars)
        if list(scalars) != self.adjustment_scalars:
            raise ValueError(
                f"the loaded state scales the parameter groups by {list(scalars)}, these have {self.adjustment_scalars}"
            )
        super().load_state_dict(own)

    def _value_for(self, group: Mapping[str, Any], value: Any) -> Any:
        return value * _factor(group)


def _factor(group: Mapping[str, Any]) -> float:
    return float(group.get("adjust_learning_rate", 1.0))


__all__ = [
    "ChainedScheduler",
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineDecayScheduler",
    "CyclicScheduler",
    "ExponentialScheduler",
    "InverseExponentialTimeDecayScheduler",
    "InverseSquareRootDecayScheduler",
    "LambdaScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "MultiplicativeScheduler",
    "OneCycleScheduler",
    "PiecewiseConstantScheduler",
    "PolynomialScheduler",
    "ScalePerParamScheduler",
    "Scheduler",
    "SequentialScheduler",
    "StepScheduler",
]

"""Schedules of any setting of a parameter group, as closed forms of a step counter that is computed in the step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from cstorch.optim.scheduler_base import CompositeScheduler, Renamed, Scheduler, Tags, check_positive

# --- The schedules that are one formula of the epoch. e = last_epoch, T = total_iters ---------------------------------


class ConstantScheduler(Scheduler):
    """val, always."""

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
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on.

    With cycle the decay starts again at each multiple of T, stretched over the whole range so far:
    `(1 - e / (T * ceil((e + 1) / T)))`.
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
        epoch = self.last_epoch
        if self.cycle:
            remaining = 1 - epoch / (self.total_iters * torch.ceil((epoch + 1) / self.total_iters))
        else:
            remaining = 1 - epoch / self.total_iters
        if self.power != 1:
            remaining = torch.pow(remaining, self.power)
        value = remaining * (self.initial_val - self.end_val) + self.end_val
        return value if self.cycle else torch.where(epoch >= self.total_iters, self.end_val, value)


class LinearScheduler(PolynomialScheduler):
    """From initial to end in T equal steps, then end."""

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
    """`initial * decay_rate^(e / T)`; with staircase the exponent is rounded down."""

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
        exponent = self.last_epoch / self.total_iters
        if self.staircase:
            exponent = torch.floor(exponent)
        return torch.pow(self.decay_rate, exponent) * self.initial_val


class StepScheduler(Scheduler):
    """`initial * gamma^floor(e / step_size)`."""

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
        return torch.pow(self.gamma, torch.floor(self.last_epoch / self.step_size)) * self.initial_val


class MultiStepScheduler(Scheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""

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


# --- The schedules that decay as the inverse of a power of the epoch. e = last_epoch, T = total_iters -----------------


class InverseExponentialTimeDecayScheduler(Scheduler):
    """`initial / (1 + decay_rate * e^step_exponent / T)`; with staircase `e^step_exponent / T` is rounded down."""

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
    """`initial * scale / sqrt(max(warmup_steps, e))`."""

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


# --- The schedules that follow a cosine. e = last_epoch, T = total_iters ----------------------------------------------


class CosineDecayScheduler(Scheduler):
    """`end + (initial - end) * (1 + cos(pi * min(e, T) / T)) / 2`."""

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
    """`eta_min + (initial - eta_min) * (1 + cos(pi * e / T_max)) / 2`: down until T_max, and up again after it."""

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
    """`eta_min + (initial - eta_min) * (1 + cos(pi * (e mod T_0) / T_0)) / 2`, as torch with T_mult 1, the only one.

    (In release 2.10 of the original the value stays what it is from e = T_0 on.)
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
            raise ValueError(f"T_mult must be 1, not {T_mult}: all cycles are of one length")
        self.initial_val = initial_val
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = (self.last_epoch % self.T_0) / self.T_0
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.eta_min)) + self.eta_min


# --- The schedules that rise and fall. e = last_epoch -----------------------------------------------------------------


class CyclicScheduler(Scheduler):
    """From base to max in step_size_up steps, back in step_size_down (as many), and again; as torch.

    The height above base is scaled by the mode: "triangular" leaves it, "triangular2" halves it each cycle, "exp_range"
    makes it `gamma^e` of what it was. A subclass scales it otherwise by `set_scale_fn`.
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
        """The function of the number of the cycle (from 1) or, with scale_mode "iterations", of the epoch."""
        match self.mode:
            case "triangular":
                return lambda cycle: 1.0
            case "triangular2":
                return lambda cycle: torch.pow(0.5, (cycle - 1).to(torch.float32))
            case "exp_range":
                self.scale_mode = "iterations"
                return lambda epoch: torch.pow(float(self.gamma), epoch.to(torch.float32))
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
    """Up from initial to max in the first pct_start of the total_steps, down to `min = initial / final_div_factor`.

    With three_phase down to initial first, in as many steps as it went up, and to min in the rest. anneal_strategy:
    "cos" or "linear", the way from one to the next. Phases end where those of torch do; then the value stays at min.
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


# --- The schedules that a subclass completes with functions of the epoch. e = last_epoch ------------------------------


Function = Callable[[torch.Tensor], torch.Tensor | float]


class LambdaScheduler(Scheduler):
    """The product of `initial * f(e)`, for each function f that `set_value_lambda` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, param_group_tags: Tags = None) -> None:
        self.initial_val = initial_val
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Sequence[Function]:
        """To be overridden. The functions get the epoch as a tensor (int64, rank 0)."""
        return [lambda epoch: epoch / 30, lambda epoch: torch.pow(0.95, epoch.to(torch.float32))]

    def _get_closed_form(self) -> torch.Tensor:
        value = torch.ones_like(self.last_epoch, dtype=torch.float32)
        for function in self.set_value_lambda():
            value = value * (self.initial_val * function(self.last_epoch))
        return value


class MultiplicativeScheduler(Scheduler):
    """`initial * coefficient^e`; a subclass may compute the coefficient from e: `set_value_lambda`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_val: float, coefficient: float, param_group_tags: Tags = None
    ) -> None:
        self.initial_val = initial_val
        self.coefficient = coefficient
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Function:
        """The function that gives the coefficient."""
        return lambda epoch: float(self.coefficient)

    def _get_closed_form(self) -> torch.Tensor:
        coefficient = self.set_value_lambda()(self.last_epoch)
        return torch.pow(coefficient, self.last_epoch.to(torch.float32)) * self.initial_val


# --- One schedule after the other -------------------------------------------------------------------------------------


class SequentialScheduler(CompositeScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next, which starts at its own epoch 0 there."""

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
    """vals[i] up to milestones[i] (exclusive), then the next. constant_cls: the class that makes a constant of each."""

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
    """The first schedule's value, times `value / initial value` of each other one."""

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
    """The scheduler's value, for each parameter group times its "adjust_learning_rate" (1 where it has none)."""

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

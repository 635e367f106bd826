"""The schedules that rise and fall. e = last_epoch."""

import math
from collections.abc import Callable

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags, check_positive


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

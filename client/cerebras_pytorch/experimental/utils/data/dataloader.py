"""The DataLoader of release 1.8, which knows how many steps there are and is iterated itself."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cerebras_pytorch.experimental.configuration import current_configuration
from cstorch.errors import ConfigurationError, UsageError
from cstorch.utils.data import DataExecutor, Schedule
from cstorch.utils.data import DataLoader as _DataLoader


class DataLoader(_DataLoader):
    """Input and number of steps of an execution: `for batch in dataloader: loss = training_step(batch)`.

    Args:
        input_fn: makes the torch DataLoader; every worker of the cluster calls it.
        *args, **kwargs: handed to input_fn.
        initial_step: the steps done before, by a run that is continued: they count towards max_steps.
        num_steps: how many steps. Not together with num_epochs.
        max_steps: at most so many, with those done before.
        num_epochs: how many times steps_per_epoch; without num_steps and num_epochs one.
        steps_per_epoch: by default the length of what input_fn makes.

    Raises:
        ConfigurationError: num_steps and num_epochs are both given, or a number is out of range.
    """

    def __init__(
        self,
        input_fn: Callable[..., Iterable[Any]],
        *args: Any,
        initial_step: int = 0,
        num_steps: int | None = None,
        max_steps: int | None = None,
        num_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_fn, *args, **kwargs)
        if num_steps is not None and (num_epochs is not None or steps_per_epoch is not None):
            raise ConfigurationError("num_steps excludes num_epochs and steps_per_epoch: give the one or the others")
        settings = {
            "num_steps": num_steps,
            "max_steps": max_steps,
            "num_epochs": num_epochs,
            "steps_per_epoch": steps_per_epoch,
        }
        for name, value in settings.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}")
        if initial_step < 0:
            raise ConfigurationError(f"initial_step must not be negative, got {initial_step}")
        if max_steps is not None and initial_step >= max_steps:
            raise ConfigurationError(f"nothing is left to do: initial_step={initial_step}, max_steps={max_steps}")
        self._initial_step = initial_step
        self._num_steps = num_steps
        self._max_steps = max_steps
        self.num_epochs = 1 if num_steps is None and num_epochs is None else num_epochs
        self._steps_per_epoch = steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The steps that an iteration takes."""
        steps = self._num_steps
        if steps is None:
            assert self.num_epochs is not None
            steps = self.num_epochs * (len(self) if self._steps_per_epoch is None else self._steps_per_epoch)
        return steps if self._max_steps is None else min(steps, self._max_steps - self._initial_step)

    def __iter__(self) -> Iterator[Any]:
        configuration = current_configuration()
        if configuration is None:
            raise UsageError("call cstorch.configure(...) before the DataLoader is iterated, or use a DataExecutor")
        steps = self.total_steps
        schedule = _checkpoints(configuration.checkpoint_steps, steps) if configuration.checkpoint_steps else None
        yield from DataExecutor(self, num_steps=steps, checkpoint_steps=schedule)


def _checkpoints(every: int, steps: int) -> Schedule:
    """Every k-th step and the last. Scripts that count from 0 save when `i % k == 0`, those that count from 1 when
    `(i + 1) % k == 0`: both find a checkpoint."""
    from_one = Schedule.every(every, steps).intervals
    return Schedule([Schedule.Range(0, steps, every), *from_one])

"""The DataLoader of release 1.8, which has the number of steps and is iterated itself."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cerebras_pytorch.experimental.configuration import current_configuration
from cstorch.errors import UsageError
from cstorch.utils.data import DataExecutor, Schedule, compute_num_steps
from cstorch.utils.data import DataLoader as _DataLoader


class DataLoader(_DataLoader):
    """The input and the number of steps of an execution: `for batch in dataloader: loss = training_step(batch)`.

    Args:
        input_fn: A function that returns the torch DataLoader; every worker of the cluster calls it.
        *args: The arguments of `input_fn`.
        initial_step: The steps done before.
        num_steps: The steps to do; excludes `num_epochs` and `steps_per_epoch`.
        max_steps: The greatest number of steps, with those done before.
        num_epochs: The epochs to do.
        steps_per_epoch: The steps of an epoch.
        **kwargs: The arguments of `input_fn`.

    Raises:
        ConfigurationError: A number is out of range, two exclude each other, or no step is left.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental.utils.data`.
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
        self._limits = (initial_step, num_steps, max_steps, num_epochs, steps_per_epoch)
        if any(limit is not None for limit in self._limits[1:]) or initial_step:
            compute_num_steps(self, *self._limits)  # refuses limits that exclude each other
        self.num_epochs = 1 if num_steps is None and num_epochs is None else num_epochs

    def __iter__(self) -> Iterator[Any]:
        configuration = current_configuration()
        if configuration is None:
            raise UsageError("call cstorch.configure(...) before the DataLoader is iterated, or use a DataExecutor")
        # Only here without limits: a loader that has no length may be given to a DataExecutor, which has the number.
        steps = compute_num_steps(self, *self._limits)
        schedule = _checkpoints(configuration.checkpoint_steps, steps) if configuration.checkpoint_steps else None
        yield from DataExecutor(self, num_steps=steps, checkpoint_steps=schedule)


def _checkpoints(every: int, steps: int) -> Schedule:
    """Returns every k-th step and the last.

    Scripts that count from 0 save when `i % k == 0`, those that count from 1 when `(i + 1) % k == 0`: both have
    checkpoints.
    """
    taken = {0, steps - 1, *range(every - 1, steps, every), *range(every, steps, every)}
    return Schedule([Schedule.Range(step, step + 1) for step in sorted(taken)])

"""How many steps a run takes."""

from collections.abc import Sized

from cstorch.errors import ConfigurationError


def compute_num_steps(
    dataloader: Sized,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """The steps that are left to do.

    Args:
        dataloader: its length is that of an epoch, in batches, where steps_per_epoch is not given.
        initial_step: steps done before.
        num_steps: steps to do. Not together with num_epochs and steps_per_epoch.
        max_steps: at most so many, with those done before.
        num_epochs: epochs to do; without num_steps, max_steps and num_epochs it is one.
        steps_per_epoch: steps of an epoch.
        grad_accum_steps: batches of a step.

    Raises:
        ConfigurationError: a number is out of range, two exclude each other, or no step is left.
        TypeError: the length of the dataloader is needed, and it has none.
    """
    numbers = {
        "num_steps": num_steps,
        "max_steps": max_steps,
        "num_epochs": num_epochs,
        "steps_per_epoch": steps_per_epoch,
        "grad_accum_steps": grad_accum_steps,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    if initial_step < 0:
        raise ConfigurationError(f"initial_step must not be negative, got {initial_step}")
    if num_steps is not None and (num_epochs is not None or steps_per_epoch is not None):
        raise ConfigurationError("num_steps excludes num_epochs and steps_per_epoch: give the one or the others")
    left = [] if max_steps is None else [max_steps - initial_step]
    if num_steps is not None:
        left.append(num_steps)
    elif num_epochs is not None or steps_per_epoch is not None or max_steps is None:
        of_epoch = len(dataloader) // grad_accum_steps if steps_per_epoch is None else steps_per_epoch
        left.append((num_epochs or 1) * of_epoch)
    if min(left) < 1:
        raise ConfigurationError(f"no step is left to do: initial_step={initial_step}, max_steps={max_steps}")
    return min(left)

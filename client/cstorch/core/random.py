"""The state of the random numbers that steps draw, to be kept in checkpoints."""

import torch

from cstorch._internal.tracing.random_counter import random_counter
from cstorch.backend import has_backend, is_on_csx


def get_rng_state() -> torch.Tensor:
    """Returns the state of the random numbers of steps, as a CPU tensor that can be saved with a checkpoint.

    On CSX the state is the counter of dropout and all other random operations of traced steps, int64 of rank 0. It
    begins with torch's seed (torch.manual_seed) at the time of the trace and advances with every step that draws
    numbers. The numbers are the same for every num_csx. On the CPU, steps draw from torch's own generator, and this is
    its state: other numbers than on CSX.

    Raises:
        StateError: The running execution has changed the state: read it in a checkpoint closure, or after the loop.
    """
    return random_counter.tensor().cpu() if has_backend() and is_on_csx() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Sets the state of the random numbers of steps. Not while a loop runs.

    Args:
        state: What `get_rng_state` returned on the same backend.

    Raises:
        ValueError: `state` is none of this backend.
    """
    counted = state.dtype is torch.int64 and state.dim() == 0
    if counted != (has_backend() and is_on_csx()):
        raise ValueError(
            "this state of random numbers was saved on another backend; seed with torch.manual_seed instead"
        )
    if counted:
        random_counter.set(state.cpu())
    else:
        torch.set_rng_state(state)

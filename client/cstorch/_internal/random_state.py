"""The state of the random generators of a process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of the generators of torch, numpy and Python."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Puts the generators back at its end."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what `random_state` gave."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])

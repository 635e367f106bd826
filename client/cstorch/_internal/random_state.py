"""The state of the random generators of a process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Returns the state of the generators of torch, numpy and Python."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Context that restores the generators at its end."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the generators to a state of `random_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two states of `random_state` are equal."""
    numpy = zip(one["numpy"], other["numpy"], strict=True)
    return (
        one["torch"] == other["torch"]
        and one["python"] == other["python"]
        and all(np.array_equal(part, another) for part, another in numpy)
    )

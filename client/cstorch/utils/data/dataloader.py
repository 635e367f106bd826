"""The DataLoader: a recipe for input that every worker of the cluster follows by itself."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import torch

from cstorch.errors import InputError


class DataLoader:
    """Input for a DataExecutor.

    Args:
        input_fn: makes the loader, an iterable of batches (a `torch.utils.data.DataLoader`, usually). Every worker of
            the cluster calls it; on the client it runs for the first batch only.
        *args, **kwargs: handed to input_fn.

    Raises:
        TypeError: input_fn is not callable.
    """

    def __init__(self, input_fn: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> None:
        if not callable(input_fn):
            raise TypeError(
                f"input_fn must be a function that returns an iterable of batches, not {type(input_fn).__name__}; "
                "hand over the function itself: DataLoader(input_fn, *args)"
            )
        self.input_fn = input_fn
        self.args = args
        self.kwargs = kwargs

    def __len__(self) -> int:
        """The number of batches of one pass.

        Raises:
            TypeError: the loader does not know its length.
        """
        before = random_state()
        try:
            loader = self._make()
            return len(loader)  # type: ignore[arg-type]  # a TypeError says so
        finally:
            set_random_state(before)

    def builder(self) -> bytes:
        """The recipe for the workers: input_fn, its arguments and the state of the random generators, pickled.

        Raises:
            InputError: the input_fn or an argument cannot be pickled.
        """
        recipe = {"input_fn": self.input_fn, "args": self.args, "kwargs": self.kwargs, "random_state": random_state()}
        try:
            return bytes(cloudpickle.dumps(recipe))
        except Exception as error:
            raise InputError(
                f"the input_fn {_name(self.input_fn)} cannot be sent to the workers: {error}. "
                "It must not hold open files, locks, or the model; make what it needs inside of it"
            ) from error

    def first_batch(self) -> Any:
        """The first batch, made here: it gives the step its shapes.

        Raises:
            InputError: the loader yields nothing.
        """
        loader = self._make()
        if isinstance(loader, torch.utils.data.DataLoader):
            # One batch is not worth processes, and forking a process that speaks gRPC is not safe.
            loader.num_workers = 0
            loader.timeout = 0
        batch = next(iter(loader), _NOTHING)
        if batch is _NOTHING:
            raise InputError(_dry(0))
        return batch

    def passes(self) -> Iterator[Any]:
        """Batches without end: pass after pass over one loader.

        Raises:
            InputError: a pass yields nothing, or the loader cannot be iterated twice.
        """
        loader = self._make()
        count = 0
        while True:
            before = count
            iterator = iter(loader)
            for batch in iterator:
                count += 1
                yield batch
            if count == before or iterator is loader:
                raise InputError(_dry(count))

    def _make(self) -> Iterable[Any]:
        loader = self.input_fn(*self.args, **self.kwargs)
        if not isinstance(loader, Iterable):
            raise InputError(
                f"the input_fn {_name(self.input_fn)} returned {type(loader).__name__}, not an iterable of batches"
            )
        return loader


_NOTHING = object()


def _dry(count: int) -> str:
    return (
        f"the loader ran dry after {count} batches and more are needed: it yields nothing, or it is a generator, which "
        "cannot be iterated a second time; let the input_fn return an object with __iter__, or lower num_steps"
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def random_state() -> dict[str, Any]:
    """The state of the generators of torch, numpy and Python."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what `random_state` gave."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])

"""What the current thread is tracing, if anything."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.provenance import Scopes
from cstorch.errors import TraceError


class StepRecorder(Protocol):
    """What records the step that a thread traces.

    number: of the recording, which no other one in the process has.
    looked_at: the ids of tensors whose gradient the step has read, or assigned, while they had none.
    draws: the place of the next random operation of the step.
    scopes: the modules that operations belong to.
    repeats: what a repeated call of the step does in Python.
    """

    number: int
    looked_at: set[int]
    draws: int
    scopes: Scopes
    repeats: list[Callable[[], None]]

    def known_value(self, tensor: Any, refusal: TraceError | None) -> torch.Tensor | None:
        """The value of a device tensor as a CPU tensor, if it is known while the step is traced.

        refusal: the error for the read, should it be of a state that the step changes; without one no state is known.
        """

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Records one call on device tensors and returns what it returns."""

    def see_on_host(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Takes note of a call that concerns no device tensor, and has run."""


class Context(threading.local):
    """One per thread: other threads of the script (input, logging) are not part of the step."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self.functions: list[Callable[..., Any]] = []
        """The torch functions called by the user that are running now, outermost first: for error messages."""


context = Context()


def name_operations(name: str) -> AbstractContextManager[None]:
    """Within it, operations that this thread traces belong to a part of this name of the module that runs."""
    recorder = context.recorder
    return nullcontext() if recorder is None else recorder.scopes.named(name)


def repeat(function: Callable[[], None]) -> None:
    """Calls a function now and, where a step is traced, again in every step that repeats it."""
    function()
    if context.recorder is not None:
        context.recorder.repeats.append(function)


def is_tracing() -> bool:
    """True while this thread traces a step."""
    return context.recorder is not None

"""The tracing context of a thread: the recorder of its step, if it traces one."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.provenance import Scopes, user_line
from cstorch.errors import CstorchError, TraceError


class Changes(Protocol):
    """What a part of the step changes of the states. See StateChanges."""

    def choose(self, keeps: torch.Tensor) -> None:
        """Ends the part: keeps its changes if `keeps`, a boolean of rank 0, is true, else takes them back."""


class StepRecorder(Protocol):
    """The recorder of the step that a thread traces.

    number: The number of the recording, unique in the process.
    read_gradients: The ids of tensors whose gradient the step has read, or assigned, while they had none, or has
        removed before their optimizer stepped.
    stepped: The ids of the parameters of optimizers that have stepped.
    draws: The index of the next random operation of the step.
    scopes: The modules of operations.
    repeats: The Python functions that a repeated call of the step calls.
    """

    number: int
    read_gradients: set[int]
    stepped: set[int]
    draws: int
    scopes: Scopes
    repeats: list[Callable[[], None]]

    def known_value(self, tensor: Any, refusal: TraceError | None) -> torch.Tensor | None:
        """Returns the value of a device tensor as a CPU tensor; None if it is not known while the step is traced.

        Args:
            tensor: The device tensor.
            refusal: The error if the value depends on a state that the step changes; with None no state is read.
        """

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Records one call on device tensors and returns its result."""

    def check_errors_of(self, info: Any) -> None:
        """Makes the operation that computed `info` check it, in place of torch's check, which needs the value."""

    def place(self) -> int:
        """Returns the number of calls that are recorded."""

    def state_changes(self) -> Changes:
        """Returns what the step changes of the states from now on."""

    def first_write_since(self, place: int) -> str | None:
        """Returns the line of the first call since a place that writes to a tensor from before it; None: no call."""

    def record_host_call(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Records a call that had no device tensor, and has run."""


class Context(threading.local):
    """The state of tracing in one thread. Other threads of the script (input, logging) are not part of the step.

    functions: The torch functions called by the user that are running now, outermost first, for error messages.
    on_refusal: Called with the error of an operation that cannot be traced or lowered, and its line; None: the error is
        raised. See `refuse`.
    """

    on_refusal: Callable[[CstorchError, str], None] | None = None

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self.functions: list[Callable[..., Any]] = []


context = Context()


@dataclass(slots=True)
class Purpose:
    """The purpose of the device tensors of this process.

    runs_steps: False: steps are at most compiled, so that the values of states are of no use.
    """

    runs_steps: bool = True


purpose = Purpose()


def refuse(error: CstorchError, line: str = "") -> None:
    """Raises the error of an operation; returns if it is only reported, and the caller goes on with a stand-in.

    line: The operation's line; by default the user's present line.
    """
    if context.on_refusal is None:
        raise error
    context.on_refusal(error, line or user_line())


def name_operations(name: str) -> AbstractContextManager[None]:
    """Assigns the operations that this thread traces in the context to a named part of the running module."""
    recorder = context.recorder
    return nullcontext() if recorder is None else recorder.scopes.named(name)


def metric_operations() -> AbstractContextManager[None]:
    """The operations that this thread traces in the context are those of a metric: mixed precision leaves them."""
    recorder = context.recorder
    return nullcontext() if recorder is None else recorder.scopes.of_metric()


def repeat(function: Callable[[], None]) -> None:
    """Calls a function now and, if a step is traced, again in every step that repeats it."""
    function()
    if context.recorder is not None:
        context.recorder.repeats.append(function)


def is_tracing() -> bool:
    """Whether this thread traces a step."""
    return context.recorder is not None

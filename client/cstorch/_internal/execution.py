"""The interface of executions, each the run of one DataExecutor, and the current one."""

import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from cstorch.errors import UsageError


class Input(Protocol):
    """The part of a DataLoader that an execution needs."""

    input_fn: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def dataloader(self) -> Iterable[Any]: ...
    @property
    def is_restartable(self) -> bool: ...
    def builder(self) -> bytes: ...
    def first_batch(self, *, has_values: bool = True) -> Any: ...
    def first_batches(self, most: int, *, has_values: bool = True) -> Sequence[Any]: ...
    def passes(self) -> Iterator[Any]: ...
    def completed(self, worker_states: list[dict[str, Any]]) -> None: ...
    def own_state(self, *, worker_step: int, samples_streamed: int) -> dict[str, Any]: ...


class StepProfiler(Protocol):
    """The part of a profiler that an execution needs."""

    def start(self) -> None:
        """Begins the first step."""

    def step(self, batch_size: int) -> None:
        """Counts a step."""

    def record_elapsed(self, seconds: float) -> None:
        """Records the end of the last counted step, in seconds after the begin of the first."""


class CheckpointSchedule(Protocol):
    """The part of a schedule of checkpoint steps that an execution needs."""

    def match(self, index: int) -> bool:
        """Whether the schedule has a step, from 0."""


class Executor(Protocol):
    """The part of a DataExecutor that an execution needs."""

    num_steps: int
    asked_steps: int  # the steps that the script asks for; more than num_steps in a checked run
    activation_steps: int

    @property
    def dataloader(self) -> Input: ...
    @property
    def profiler(self) -> StepProfiler: ...
    @property
    def artifact_dir(self) -> Path: ...
    @property
    def checkpoint_schedule(self) -> CheckpointSchedule | None: ...
    @property
    def checkpoint_steps(self) -> list[int]: ...
    @property
    def iteration(self) -> int: ...
    @property
    def user_iteration(self) -> int: ...
    @property
    def on_final_iteration(self) -> bool: ...
    @property
    def on_activation_step(self) -> bool: ...
    @property
    def on_checkpoint_step(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """A call of a step closure or checkpoint closure by the script."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at_checkpoint: bool

    def run(self) -> Any:
        """Calls the user's function."""
        return self.function(*self.args, **self.kwargs)


class Execution(ABC):
    """The run of one DataExecutor, from its first batch to its last closure.

    completes_left_step: Whether a step whose function was called is completed when the script leaves its loop there.
    """

    completes_left_step = True

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    @property
    def last_step(self) -> int:
        """The last step that is done, from 1, after an error of the input; 0: none."""
        return self.executor.user_iteration

    @abstractmethod
    def batches(self) -> Generator[Any]:
        """Yields the batch of each step, and completes the step before the next yield."""

    @abstractmethod
    def input_states(self) -> list[dict[str, Any]]:
        """Returns the state of every worker's loader after the current checkpoint step.

        Raises:
            UsageError: The states are not known at this time.
        """

    @abstractmethod
    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of the traced function, and returns its result."""

    @abstractmethod
    def use_model(self, model: nn.Module) -> None:
        """Records the call of a compiled model."""

    @abstractmethod
    def call_closure(self, closure: Closure) -> Any:
        """Handles a call of a closure, and returns its result if it runs now."""


_NESTED = """\
another DataExecutor is being iterated; finish its loop before you start the next one: an execution runs one graph, \
from its first step to its last. To evaluate every `n` steps of training, let the executions follow each other:

    for _ in range(num_steps // n):
        model.train()
        for batch in cstorch.utils.data.DataExecutor(training_loader, num_steps=n):
            note_training(training_step(batch))
        model.eval()
        for batch in cstorch.utils.data.DataExecutor(evaluation_loader, num_steps=m):
            note_evaluation(evaluation_step(batch))

Weights and the state of the optimizer go on from one execution to the next"""

_KEPT = ". An iterator that the script keeps, as in `batches = iter(executor)`, is in its loop until `batches.close()`"

_current: Execution | None = None
_thread = 0  # that of the current one
_loops: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()  # all iterators of executors; at most one is in its loop


def current_execution() -> Execution | None:
    """Returns the execution whose loop the script runs; None outside of loops."""
    return _current


def check_outside_of_loops(otherwise: str) -> None:
    """Checks that this process is in no loop of an executor.

    Args:
        otherwise: The error message for a thread in a loop.

    Raises:
        UsageError: This thread, or another one of the process, is in the loop of an executor.
    """
    if _current is not None and _thread != threading.get_ident():
        raise UsageError(
            "another thread of this process is in the loop of an executor, and a process has one such loop at a time: "
            "begin when that has ended, or use another process (multiprocessing.get_context('spawn'))"
        )
    if _current is not None:
        raise UsageError(otherwise + _KEPT)


def check_not_nested() -> None:
    """Checks that the loop of an executor can begin.

    Raises:
        UsageError: The script is in the loop of another executor.
    """
    check_outside_of_loops(_NESTED)


@contextmanager
def enter(execution: Execution) -> Iterator[None]:
    """Makes an execution the current one in the context.

    Raises:
        UsageError: The script is in the loop of another executor.
    """
    global _current, _thread
    check_not_nested()
    _current, _thread = execution, threading.get_ident()
    try:
        yield
    finally:
        _current = None


def record_loop(loop: Generator[Any]) -> None:
    """Records the iterator of an executor, for `leave_loop`."""
    _loops.add(loop)


def leave_loop(*, completes_step: bool) -> None:
    """Leaves the loop of an executor whose iterator the script keeps. No effect while another thread is in a loop.

    Args:
        completes_step: Whether a step whose function was called is completed, as where the script leaves its loop.
    """
    if _current is None:
        return
    if _thread != threading.get_ident() and _thread in {thread.ident for thread in threading.enumerate()}:
        return
    _current.completes_left_step = completes_step
    for loop in list(_loops):
        if inspect.getgeneratorstate(loop) == inspect.GEN_SUSPENDED:
            loop.close()


def current_executor() -> Executor:
    """Returns the DataExecutor that is being iterated.

    Raises:
        UsageError: There is none.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if _current is None:
        raise UsageError("there is no current executor: call this inside `for batch in executor:`")
    return _current.executor

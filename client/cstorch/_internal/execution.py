"""An execution is the run of one DataExecutor: its interface, and the one under way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from cstorch.errors import UsageError


class Input(Protocol):
    """The DataLoader of an execution, which describes its methods."""

    @property
    def is_restartable(self) -> bool: ...
    def builder(self) -> bytes: ...
    def first_batch(self) -> Any: ...
    def passes(self) -> Iterator[Any]: ...
    def completed(self, worker_states: list[dict[str, Any]]) -> None: ...
    def own_state(self, *, worker_step: int, samples_streamed: int) -> dict[str, Any]: ...


class StepProfiler(Protocol):
    """What measures the steps of an execution."""

    def start(self) -> None:
        """The first step begins now."""

    def step(self, batch_size: int) -> None:
        """Counts a step."""

    def record_elapsed(self, seconds: float) -> None:
        """The step that was counted last has ended so many seconds after the first began."""


class Executor(Protocol):
    """The DataExecutor that an execution runs; it describes its properties."""

    num_steps: int
    activation_steps: int

    @property
    def dataloader(self) -> Input: ...
    @property
    def profiler(self) -> StepProfiler: ...
    @property
    def artifact_dir(self) -> Path: ...
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
    """A call of a step closure or checkpoint closure that a script has made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at_checkpoint: bool

    def run(self) -> Any:
        """Calls the user's function."""
        return self.function(*self.args, **self.kwargs)


class Execution(ABC):
    """The run of one DataExecutor, from its first batch to its last closure."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    @abstractmethod
    def batches(self) -> Generator[Any]:
        """Yields the batch of each step; work between two yields is the end of a step."""

    @abstractmethod
    def input_states(self) -> list[dict[str, Any]]:
        """The state of every worker's loader after the checkpoint step at hand.

        Raises:
            UsageError: it is not known at this moment.
        """

    @abstractmethod
    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the traced function."""

    @abstractmethod
    def use_model(self, model: nn.Module) -> None:
        """A compiled model is called."""

    @abstractmethod
    def call_closure(self, closure: Closure) -> Any:
        """A call of a closure."""


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

Weights and the state of the optimizer go on from one execution to the next; docs/patterns.md has the whole script."""

_current: Execution | None = None


def current_execution() -> Execution | None:
    """The execution whose loop the script is in."""
    return _current


@contextmanager
def enter(execution: Execution) -> Iterator[None]:
    """Makes `execution` the current one.

    Raises:
        UsageError: the loop of another executor is under way.
    """
    global _current
    if _current is not None:
        raise UsageError(_NESTED)
    _current = execution
    try:
        yield
    finally:
        _current = None


def current_executor() -> Executor:
    """The DataExecutor that is being iterated.

    Raises:
        UsageError: there is none.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if _current is None:
        raise UsageError("there is no current executor: call this inside `for batch in executor:`")
    return _current.executor

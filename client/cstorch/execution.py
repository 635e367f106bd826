"""What runs the steps of a DataExecutor: the interface of an execution, the one under way, and the CPU's."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from cstorch.batch import infer_batch_size
from cstorch.errors import UsageError

if TYPE_CHECKING:
    from cstorch.utils.data.executor import DataExecutor


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

    def __init__(self, executor: "DataExecutor") -> None:
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


class CpuExecution(Execution):
    """Runs the step eagerly with plain CPU tensors; closures run at once."""

    def __init__(self, executor: "DataExecutor") -> None:
        super().__init__(executor)
        self._samples = 0

    def batches(self) -> Generator[Any]:
        for batch in itertools.islice(self.executor.dataloader.passes(), self.executor.num_steps):
            rows = infer_batch_size(batch) or 0
            self._samples += rows
            self.executor.profiler.step(rows)
            yield batch

    def input_states(self) -> list[dict[str, Any]]:
        step = self.executor.user_iteration
        return [self.executor.dataloader.own_state(worker_step=step, samples_streamed=self._samples)]

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def use_model(self, model: nn.Module) -> None:
        pass

    def call_closure(self, closure: Closure) -> Any:
        executor = self.executor
        due = executor.on_checkpoint_step if closure.at_checkpoint else executor.on_activation_step
        return closure.run() if due else None


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
        raise UsageError("another DataExecutor is being iterated; finish its loop before you start the next one")
    _current = execution
    try:
        yield
    finally:
        _current = None


def current_executor() -> "DataExecutor":
    """The DataExecutor that is being iterated.

    Raises:
        UsageError: there is none.
    """
    if _current is None:
        raise UsageError("there is no current executor: call this inside `for batch in executor:`")
    return _current.executor

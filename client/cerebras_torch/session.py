"""The Session, within which a plain loop of PyTorch runs on the cluster."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Literal, Self

import torch

from cerebras_torch.run import current_run
from cerebras_torch.setup import check_initialized
from cstorch._internal.execution import current_execution
from cstorch.core.closures import step_closure
from cstorch.errors import ConfigurationError, UsageError
from cstorch.optim import Optimizer
from cstorch.utils.data import DataExecutor


class Session:
    """Runs plain loops over a `cbtorch.dataloader`: each body is one step.

    On the cluster the body is recorded instead of computed. Its tensors have no values; step closures get the values.

    Args:
        *objects: `Session(model, optimizer, criterion, mode="train")` or `Session(dataloader, mode="train")`.
        mode: "train" or "eval".

    Raises:
        UsageError: Nothing is initialized yet, or the optimizer was not made by `cbtorch.optimizer`.
        ConfigurationError: The mode has another name.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """

    def __init__(self, *objects: Any, mode: Literal["train", "eval"] = "train") -> None:
        check_initialized()
        if mode not in ("train", "eval"):
            raise ConfigurationError(f'mode must be "train" or "eval", got {mode!r}')
        for given in objects:
            if isinstance(given, torch.optim.Optimizer) and not isinstance(given, Optimizer):
                raise UsageError(
                    f"torch.optim.{type(given).__name__} makes its state within the step, which is recorded before it "
                    "runs: give the Session, and call in its loop, what cbtorch.optimizer(...) makes of it"
                )
        self.mode = mode
        self._loops: list[Generator[Any]] = []

    def __enter__(self) -> Self:
        global _current
        if _current is not None:
            raise UsageError("a cbtorch.Session is open already: leave it before the next one begins")
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        _current = None
        for loop in self._loops:
            loop.close()  # one that was left early still records
        self._loops.clear()

    def steps(self, executor: DataExecutor) -> Generator[Any]:
        """Returns the batches of an executor.

        Args:
            executor: The executor.
        """
        loop = _counted(executor)
        self._loops = [loop]
        return loop

    def add_step_closure(
        self, function: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Calls a function with values once the step has run. To be called in every step.

        Args:
            function: The function.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        step_closure(function)(*args, **(kwargs or {}))

    def mark_step(self) -> None:
        """Ends the step here, not with the next batch: waits for its values and runs its step closures."""
        from cstorch._internal.session.execution.loop import LoopExecution  # the CPU needs no gRPC

        execution = current_execution()
        if isinstance(execution, LoopExecution):
            execution.mark_step()


def _counted(executor: DataExecutor) -> Generator[Any]:
    run = current_run()
    run.executor = executor
    with closing(iter(executor)) as batches:
        for batch in batches:
            run.steps += 1
            yield batch


_current: Session | None = None


def current_session() -> Session | None:
    """Returns the open session; None without one."""
    return _current

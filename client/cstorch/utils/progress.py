"""The progress of an execution: a bar on a terminal, elsewhere log lines in the form of the real system."""

import logging
import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cstorch._internal.backend.interface import Backend
from cstorch.utils.profiler import Profiler

logger = logging.getLogger("cstorch.progress")


class Steps(Protocol):
    """The part of a DataExecutor that Progress reads."""

    num_steps: int
    backend: Backend

    @property
    def user_iteration(self) -> int: ...
    @property
    def on_final_iteration(self) -> bool: ...
    @property
    def profiler(self) -> Profiler: ...


class Progress:
    """Reports the steps of an executor. Call `step` in a step closure.

    Without a terminal it logs lines such as `| Train Device=CSX, Step=50, Loss=2.30259, Rate=69.37 samples/sec,
    GlobalRate=69.37 samples/sec`.

    Args:
        mode: The first word of a line: "Train" or "Eval".
        executor: The executor whose steps are counted.
        every: The number of steps between two lines, at least 1. The last step always has a line.

    Raises:
        ValueError: `every` is less than 1.
    """

    def __init__(self, mode: str, executor: Steps, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._mode = mode
        self._executor = executor
        self._every = every
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._mode, total=self._executor.num_steps, values="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, *, loss: float) -> None:
        """Reports the current step.

        Args:
            loss: The loss of the step.
        """
        executor = self._executor
        number = executor.user_iteration
        due = number % self._every == 0 or executor.on_final_iteration
        if not due and self._bar is None:
            return
        rate, global_rate = executor.profiler.rate(), executor.profiler.global_rate()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number, values=f"Loss={loss:.5f} {rate:.0f} samples/sec")
            return
        device = executor.backend.backend_type.name
        logger.info(progress_line(self._mode, device, number, loss, rate, global_rate))


def progress_line(mode: str, device: str, step: int, loss: float, rate: float, global_rate: float) -> str:
    """Returns the line of a step in the form of the real system; rates in samples per second."""
    rates = f"Rate={rate:.2f} samples/sec, GlobalRate={global_rate:.2f} samples/sec"
    return f"| {mode} Device={device}, Step={step}, Loss={loss:.5f}, {rates}"

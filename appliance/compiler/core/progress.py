"""The progress of a compile or a prediction, which those who wait for it are shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is under way.

    Attributes:
        stage: in plain English, such as "making the wafer's kernels".
        done: the number of layers that are done; forward and backward are two.
        of: the number of all layers; 0: they are not counted.
    """

    stage: str
    done: int = 0
    of: int = 0

    def __str__(self) -> str:
        return f"{self.stage}, layer {self.done:,} of {self.of:,}" if self.of else self.stage


# A variable of the context, and no parameter: the deepest loops know the layer, and no function between them cares.
_show: ContextVar[Callable[[Progress], None] | None] = ContextVar("show", default=None)


@contextmanager
def progress_shown(show: Callable[[Progress], None]) -> Iterator[None]:
    """Context in which a function takes the progress of this thread, and of those that copy its context.

    show: called often, by the thread that works, so that it should do no more than to keep its argument.
    """
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def progress(stage: str, done: int = 0, of: int = 0) -> None:
    """Notes what is under way; see Progress."""
    if (show := _show.get()) is not None:
        show(Progress(stage=stage, done=done, of=of))

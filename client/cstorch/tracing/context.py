"""What the current thread is tracing, if anything."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cstorch.tracing.recording.recorder import Recorder


class Context(threading.local):
    """One per thread: other threads of the script (input, logging) are not part of the step."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.functions: list[Callable[..., Any]] = []
        """The torch functions called by the user that are running now, outermost first: for error messages."""


context = Context()


def name_operations(name: str) -> AbstractContextManager[None]:
    """Within it, operations that this thread traces belong to a part of this name of the module that runs."""
    recorder = context.recorder
    return nullcontext() if recorder is None else recorder.scopes.named(name)


def is_tracing() -> bool:
    """True while this thread traces a step."""
    return context.recorder is not None

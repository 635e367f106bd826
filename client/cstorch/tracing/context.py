"""What the current thread is tracing, if anything."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cstorch.tracing.recorder import Recorder


class Context(threading.local):
    """One per thread: other threads of the script (input, logging) are not part of the step."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.functions: list[Callable[..., Any]] = []
        """The torch functions called by the user that are running now, outermost first: for error messages."""


context = Context()


def is_tracing() -> bool:
    """True while this thread traces a step."""
    return context.recorder is not None

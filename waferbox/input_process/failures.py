"""Errors of the user's input, and their texts."""

import os
import re
import traceback

TRACEBACK_CHARACTERS = 20_000

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")
_EXITED = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")

_HERE = os.path.dirname(__file__)


class InputFailure(Exception):
    """Raised for an error of the user's input, with a message for the user."""

    def __init__(self, message: str, trace: str = "", *, killed: bool = False) -> None:
        """killed: whether the cause is only that a process of the loader was killed."""
        super().__init__(message)
        self.trace = trace
        self.killed = killed


def names_killed_process(error: BaseException | None) -> bool:
    """Whether torch raised the error, or a cause of it, since a process of a DataLoader was killed.

    torch raises it from a signal handler, and so anywhere in the code, or where it has waited in vain for a batch.
    """
    while error is not None:
        if isinstance(error, RuntimeError):
            text = str(error)
            if _KILLED.match(text) or (_EXITED.match(text) and _killed_processes(error)):
                return True
        error = error.__cause__ or error.__context__
    return False


def _killed_processes(error: RuntimeError) -> bool:
    """Whether a signal ended one of the processes that torch found ended; the text of its error lists only numbers."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        processes = frame.f_locals.get("failed_workers")
        if isinstance(processes, list):
            return any((process.exitcode or 0) < 0 for process in processes)
    return False


def summary(error: BaseException) -> str:
    """Returns the last line of an exception as Python prints it."""
    return traceback.format_exception_only(type(error), error)[-1].strip()


def user_traceback(error: BaseException) -> str:
    """Returns the traceback from the first frame outside of this package; a long one without its middle."""
    frames = error.__traceback__
    while (
        frames is not None
        and os.path.dirname(frames.tb_frame.f_code.co_filename) == _HERE
        and frames.tb_next is not None
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n  ...\n{text[-half:]}"
    return text

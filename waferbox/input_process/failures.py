"""What is wrong with the user's input, and how it is told."""

import os
import re
import traceback

TRACEBACK_CHARACTERS = 20_000

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")

_HERE = os.path.dirname(__file__)


class InputFailure(Exception):
    """What is wrong with the user's input, in words for the user.

    killed: nothing is wrong with it, but a process that it had started was killed.
    """

    def __init__(self, message: str, trace: str = "", *, killed: bool = False) -> None:
        super().__init__(message)
        self.trace = trace
        self.killed = killed


def names_killed_process(error: BaseException | None) -> bool:
    """Whether it is what a torch DataLoader raises, wherever we are, when one of its processes is killed."""
    while error is not None:
        if isinstance(error, RuntimeError) and _KILLED.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def summary(error: BaseException) -> str:
    """The last line of what Python prints of an exception."""
    return traceback.format_exception_only(type(error), error)[-1].strip()


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not of this package."""
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

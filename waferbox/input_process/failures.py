"""Errors of the user's input, and their texts."""

import bdb
import concurrent.futures
import multiprocessing.connection
import multiprocessing.process
import os
import re
import traceback

TRACEBACK_CHARACTERS = 20_000

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")
_EXITED = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
_CLOSED = (OSError, EOFError, concurrent.futures.BrokenExecutor)
_STATUS_SECONDS = 1.0

# What the user's code may raise; it is reported.
USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)

_HERE = os.path.dirname(__file__)


class InputFailure(Exception):
    """Raised for an error of the user's input, with a message for the user."""

    def __init__(self, message: str, trace: str = "", *, killed: bool = False) -> None:
        """killed: whether the cause is only that a process of the loader was killed."""
        super().__init__(message)
        self.trace = trace
        self.killed = killed


def names_killed_process(error: BaseException | None) -> bool:
    """Whether the error, or a cause of it, is what the death of a killed process of the loader looks like.

    torch raises its errors from a signal handler, and so anywhere in the code, or where it has waited in vain for a
    batch. What reads from the process at that moment finds a closed connection.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and _KILLED.match(str(error)):
            return True
        is_closed = isinstance(error, _CLOSED) or (isinstance(error, RuntimeError) and _EXITED.match(str(error)))
        if is_closed and _has_killed_process():
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_killed_process() -> bool:
    """Whether a signal has ended a process that multiprocessing has started here, and that is still referred to."""
    started = [
        process
        for process in list(multiprocessing.process._dangling)  # type: ignore[attr-defined]  # the ended ones too
        if process._popen is not None and process._parent_pid == os.getpid()
    ]
    living = {process.sentinel: process for process in started if process.exitcode is None}
    if living and not any((process.exitcode or 0) < 0 for process in started):
        for sentinel in multiprocessing.connection.wait(list(living), _STATUS_SECONDS):
            living[sentinel].join()  # A process closes its connections shortly before its status can be read.
    return any((process.exitcode or 0) < 0 for process in started)


def summary(error: BaseException) -> str:
    """Returns the last line of an exception as Python prints it."""
    if isinstance(error, bdb.BdbQuit):
        return (
            "BdbQuit: a debugger, as of breakpoint(), has no terminal in this process; it has one with "
            'cstorch.backend("CPU"), where the input_fn runs in the script'
        )
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        line += (
            "; is it the limit of processes and threads (`ulimit -u`, pids.max)? A loader needs some for each worker"
        )
    return line


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

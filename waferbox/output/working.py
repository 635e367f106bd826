"""What a command does while it takes long: a status on a terminal, plain lines on standard error elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from waferbox.host.slow_work import INTERVALS, reported
from waferbox.output.console import errors, printable

# Commands that take less do not flicker.
TERMINAL_INTERVALS: Final = (0.5, 10.0)


class Working:
    """The work of a command, as `working` shows it. Used by one thread, whose last text another one shows."""

    def __init__(self, intervals: Sequence[float]) -> None:
        self._intervals = intervals
        self._what = ""
        self._where: object = ""
        self._printed = ""
        self._shown: Live | None = None
        self._part = ExitStack()

    def now(self, what: str) -> None:
        """Begins another part of the work, such as "compiling the step", which gets a line of its own if it is slow."""
        self._part.close()
        self._what, self._where = what, ""
        self._part.enter_context(reported(self._show, self._intervals))

    def at(self, where: object) -> None:
        """Says where the work is, such as "layer 12 of 96". It may be called often: it makes and shows no text."""
        self._where = where

    def end(self) -> None:
        """Shows no more."""
        self._part.close()
        if self._shown is not None:
            self._shown.stop()

    def __rich__(self) -> Text:
        return Text(printable(self._text))

    @property
    def _text(self) -> str:
        where = str(self._where)
        return f"{self._what}: {where} ..." if where else f"{self._what} ..."

    def _show(self) -> None:
        if not errors.is_terminal or errors.is_dumb_terminal:
            if (text := self._text) != self._printed:
                self._printed = text
                errors.print(f"waferbox: {printable(text)}", markup=False, soft_wrap=True)
        elif self._shown is None:
            spinner = Spinner("dots", text=self, style="status.spinner")  # which renders the present text each time
            # By default what the command writes to standard output would go to standard error meanwhile.
            self._shown = Live(spinner, console=errors, transient=True, redirect_stdout=False, refresh_per_second=12.5)
            self._shown.start()


@contextmanager
def working(what: str) -> Iterator[Working]:
    """Context of work that may take more than two seconds. Contexts are not nested, and none prints its results.

    Args:
        what: the work, such as "starting the cluster".
    """
    work = Working(TERMINAL_INTERVALS if errors.is_terminal else INTERVALS)
    try:
        work.now(what)
        yield work
    finally:
        work.end()

"""Where the commands write, and how they end."""

import enum
import os
import sys
from typing import Final, Never

import typer
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

UNFOLDED_WIDTH: Final = 10_000


class Status(enum.IntEnum):
    """What a command exits with, if not with 0. docs/command.md names them."""

    FAILED = 1  # the cluster refused it, or does not answer
    USAGE = 2  # also given by typer
    NO_JOB = 3  # no job has this name, or several have
    AWAY = 4  # the management service went away while a job was followed, and did not come back
    BROKEN_PIPE = 141  # nobody reads what it writes: as a shell says of a command that SIGPIPE ends


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Without a word: `waferbox logs JOB | head` is no error."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter flushes at its end
        raise SystemExit(Status.BROKEN_PIPE)


_fits_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
output: Final = _Output(highlight=False, width=None if _fits_terminal else UNFOLDED_WIDTH)
errors: Final = Console(stderr=True, highlight=False)


def printable(text: str) -> str:
    """The text without what could steer a terminal: it may come from anybody. Lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def fail(message: str, status: Status = Status.FAILED) -> Never:
    """Say why on standard error, and exit."""
    errors.print(f"[bold red]waferbox:[/] {escape(printable(message))}", soft_wrap=True)
    raise typer.Exit(status)


def warn(text: str) -> None:
    """Something that one should know, on standard error."""
    errors.print(f"[yellow]waferbox: {escape(text)}[/]", soft_wrap=True)


def say(text: str) -> None:
    """Text as it stands: no markup, not folded."""
    output.print(text, markup=False, soft_wrap=True)


def print_unfolded(table: Table) -> None:
    """A table as wide as it is. Where the terminal wraps a line, it is for what stands in it, not for blanks."""
    header, rule, *rows = output.render_lines(table, output.options.update_width(UNFOLDED_WIDTH), pad=False)
    header = _stripped(header)
    rule = [Segment(rule[0].text[0] * Segment.get_line_length(header), rule[0].style)]
    for line in (header, rule, *map(_stripped, rows)):
        output.print(Text.assemble(*((segment.text, segment.style or "") for segment in line)), soft_wrap=True)


def _stripped(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def print_heading(text: str) -> None:
    """A title."""
    output.print(text, style="bold", markup=False)

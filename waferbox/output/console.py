"""The streams to which the commands write, the formats of data (`-o`), and the exit statuses."""

import contextlib
import enum
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, Never

import typer
import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# --- Streams and exit statuses ----------------------------------------------------------------------------------------


STANDARD_OUTPUT: Final = "-"  # where an option names a file
UNFOLDED_WIDTH: Final = 10_000


class Status(enum.IntEnum):
    """The exit statuses of commands other than 0, as in docs/command.md."""

    FAILED = 1  # the cluster refused the request, or does not answer
    USAGE = 2  # also used by typer
    NO_JOB = 3  # no job has this name, or several have it
    AWAY = 4  # management became unavailable while the command followed a job, and did not return
    BROKEN_PIPE = 141  # the reader of the output has ended; shells report a command that SIGPIPE ended so


class UnwritableOutput(Exception):
    """Raised where standard output takes no more, such as on a full disk."""


class _Output(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            _discard_output()
            raise UnwritableOutput(error.strerror) from error

    def on_broken_pipe(self) -> None:
        """Exits without a message: `waferbox logs JOB | head` is no error."""
        _discard_output()
        raise SystemExit(Status.BROKEN_PIPE)


def _discard_output() -> None:
    """Makes standard output go nowhere: the interpreter flushes it at its end, and must not fail then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


for _stream in (sys.stdout, sys.stderr):
    # A character that a terminal cannot show is no reason to fail. A replaced descriptor may have no position to keep.
    if isinstance(_stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            _stream.reconfigure(errors="replace")

_fits_terminal = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
output: Final = _Output(highlight=False, width=None if _fits_terminal else UNFOLDED_WIDTH)
errors: Final = Console(stderr=True, highlight=False)


def printable(text: str) -> str:
    """The text without control characters but newline and tab: untrusted text must not control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def fail(message: str, status: Status = Status.FAILED) -> Never:
    """Prints an error to standard error, and exits."""
    print_error(message)
    raise typer.Exit(status)


def print_error(message: str) -> None:
    """Prints an error to standard error."""
    errors.print(f"[bold red]waferbox:[/] {escape(printable(message))}", soft_wrap=True)


def warn(text: str) -> None:
    """Prints a warning to standard error."""
    errors.print(f"[yellow]waferbox: {escape(text)}[/]", soft_wrap=True)


def print_text(text: str) -> None:
    """Prints text without markup, unfolded."""
    output.print(text, markup=False, soft_wrap=True)


def print_exactly(text: str) -> None:
    """Prints a file's content to standard output, for programs."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        output.on_broken_pipe()
    except OSError as error:
        _discard_output()
        raise UnwritableOutput(error.strerror) from error


def print_unfolded(table: Table) -> None:
    """Prints a table at its full width, without blanks at the ends of lines, which a terminal would wrap."""
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
    """Prints a title."""
    output.print(text, style="bold", markup=False)


# --- Formats ----------------------------------------------------------------------------------------------------------


_WIDE_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


class Format(enum.StrEnum):
    """A format of a command's output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether programs read the format."""
        return self in (Format.JSON, Format.YAML)


FormatOption = Annotated[Format, typer.Option("-o", "--output", help="Format; wide: more columns, none folded.")]


def print_data(data: Message | Mapping[str, Any], form: Format) -> None:
    """Prints a message as JSON or YAML, with every field, under its name in the protocol."""
    shown = as_data(data) if isinstance(data, Message) else data
    if form == Format.JSON:
        print_text(json.dumps(shown, indent=2))
    else:
        print_text(yaml.safe_dump(shown, sort_keys=False).rstrip("\n"))


def as_data(message: Message) -> dict[str, Any]:
    """The message as dictionaries, lists, strings and numbers."""
    data = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_integers(data, message.DESCRIPTOR)
    return data


def _restore_integers(data: dict[str, Any], descriptor: Any) -> None:
    """Makes numbers of 64-bit integers, which protobuf's JSON has as strings: scripts compare these counts."""
    for field in descriptor.fields:
        value = data.get(field.name)
        if field.cpp_type in _WIDE_INTEGERS and isinstance(value, str):
            data[field.name] = int(value)
        elif field.message_type is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _restore_integers(part, field.message_type)

"""Where the commands write, in which format (`-o`), and how they end."""

import enum
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

# --- Where the commands write, and how they end -----------------------------------------------------------------------


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


# --- `-o`: what a command shows, as a table for people or as data for programs ----------------------------------------


_WIDE_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


class Format(enum.StrEnum):
    """A format of what is shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether it is for programs."""
        return self in (Format.JSON, Format.YAML)


FormatOption = Annotated[Format, typer.Option("-o", "--output", help="Format; wide: more columns, none folded.")]


def print_data(data: Message | Mapping[str, Any], form: Format) -> None:
    """Print it as JSON or YAML, with the names of the protocol and every field."""
    shown = as_data(data) if isinstance(data, Message) else data
    if form == Format.JSON:
        say(json.dumps(shown, indent=2))
    else:
        say(yaml.safe_dump(shown, sort_keys=False).rstrip("\n"))


def as_data(message: Message) -> dict[str, Any]:
    """The message as dictionaries, lists, strings and numbers."""
    data = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_integers(data, message.DESCRIPTOR)
    return data


def _restore_integers(data: dict[str, Any], descriptor: Any) -> None:
    """JSON of protobuf has integers of 64 bits as strings. Ours are counts, which scripts want to compare."""
    for field in descriptor.fields:
        value = data.get(field.name)
        if field.cpp_type in _WIDE_INTEGERS and isinstance(value, str):
            data[field.name] = int(value)
        elif field.message_type is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _restore_integers(part, field.message_type)

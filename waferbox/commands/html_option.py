"""The option --html: a file for the result as a page."""

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from waferbox.output.console import STANDARD_OUTPUT, fail, print_exactly


def _writable(file: Path | None) -> Path | None:
    """Refuses a file that cannot be written before the work for it is done."""
    if file is not None and not is_printed(file) and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written")
    return file


HtmlOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="OUT",
        help="Write the result as a page of HTML; - is standard output.",
        dir_okay=False,
        callback=_writable,
    ),
]


def is_printed(html: Path | None) -> bool:
    """Whether the page goes to standard output, which then has nothing else."""
    return str(html) == STANDARD_OUTPUT


def refuse_json_with(html: Path | None) -> None:
    """Ends a command that is to print JSON too, before its work. Raises BadParameter: the page is printed."""
    if is_printed(html):
        raise typer.BadParameter("--html: standard output has either the page or what --json prints; name a file")


def write_page(file: Path, page: str) -> None:
    """Writes a page to the file of the option; ends the command if that is impossible."""
    if is_printed(file):
        print_exactly(page)
        return
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"the page cannot be written: {error}")

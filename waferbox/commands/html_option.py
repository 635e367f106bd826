"""The option --html: a file for the result as a page."""

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from waferbox.output.console import fail


def _writable(file: Path | None) -> Path | None:
    """Refuses a file that cannot be written before the work for it is done."""
    if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written")
    return file


HtmlOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="OUT", help="Write the result as a page of HTML.", dir_okay=False, callback=_writable
    ),
]


def write_page(file: Path, page: str) -> None:
    """Writes a page to the file of the option; ends the command if that is impossible."""
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"the page cannot be written: {error}")

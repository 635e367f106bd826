"""A verdict as a page: one file of HTML that needs no script, font or network."""

from pathlib import Path
from typing import Final

from appliance.drawing.pages import template_environment
from waferbox.check.verdict import TITLES, State, Verdict

_PAGE: Final = template_environment(Path(__file__).with_name("templates")).get_template("verdict.html")
_MARKS: Final = {State.GOOD: "✓", State.FOUND: "✗", State.OPEN: "–"}


def verdict_page(verdict: Verdict) -> str:
    """Returns the page of a verdict."""
    return _PAGE.render(verdict=verdict, titles=TITLES, marks=_MARKS, command=_shown(verdict.command))


def _shown(command: tuple[str, ...]) -> str:
    """Returns the command as the user wrote it, without the interpreter."""
    return " ".join(command[1:] if len(command) > 1 and command[1].endswith(".py") else command)

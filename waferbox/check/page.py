"""A verdict as a page: one file of HTML that needs no script, font or network."""

from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from waferbox.check.verdict import TITLES, State, Verdict

_TEMPLATE: Final = Path(__file__).parent / "page.html"
_MARKS: Final = {State.GOOD: "✓", State.FOUND: "✗", State.OPEN: "–"}


def verdict_page(verdict: Verdict) -> str:
    """Returns the page of a verdict."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(verdict=verdict, titles=TITLES, marks=_MARKS, command=_shown(verdict.command))


def _shown(command: tuple[str, ...]) -> str:
    """Returns the command as the user wrote it, without the interpreter."""
    return " ".join(command[1:] if len(command) > 1 and command[1].endswith(".py") else command)

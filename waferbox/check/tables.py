"""A verdict as text for a terminal."""

from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from waferbox.check.verdict import TITLES, Answer, State, Verdict
from waferbox.output.console import output
from waferbox.output.tables import empty_table

# By state, its mark, that of terminals without such characters, and its style.
_MARKS: Final = {
    State.GOOD: ("✓", "+", "green"),
    State.FOUND: ("✗", "x", "bold red"),
    State.OPEN: ("–", "-", "dim"),
}
_INDENT: Final = (0, 0, 0, 2)


def verdict_text(verdict: Verdict) -> Group:
    """Returns the answers, each with its findings and figures, and the verdict in a line."""
    parts: list[RenderableType] = []
    for answer in verdict.answers:
        parts += [*_answer_text(answer), Text()]
    parts.append(_last_line(verdict))
    return Group(*parts)


def _answer_text(answer: Answer) -> list[RenderableType]:
    mark, plain_mark, style = _MARKS[answer.state]
    if output.options.ascii_only:
        mark = plain_mark
    parts: list[RenderableType] = [
        Text.assemble((f"{mark} ", style), (TITLES[answer.question], "bold"), " ", answer.summary)
    ]
    for finding in answer.findings:
        text = Text(finding.message)
        if finding.line and finding.line not in finding.message:
            text = Text.assemble((f"{finding.line}: ", "bold"), finding.message)
        parts.append(Padding(text, _INDENT))
    if len(answer.table) > 1:
        parts.append(Padding(_table(answer.table), _INDENT))
    return parts


def _table(rows: tuple[tuple[str, ...], ...]) -> Table:
    heading, *others = rows
    table = empty_table(*heading, right=heading[1:-1], whole=heading[:-1])
    for row in others:
        table.add_row(*row)
    return table


def _last_line(verdict: Verdict) -> Text:
    style = "bold red" if verdict.status else "bold green"
    return Text.assemble((verdict.conclusion, style), f" ({verdict.seconds:.0f} s)")

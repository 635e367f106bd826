"""`python docs/rights.py`: writes the table of rights into docs/security.md, from the table that servers check.

The table is the text after `## The table of rights`, at the end of the page.
"""

from pathlib import Path
from typing import Final

from waferbox.security.rights import RIGHTS, JobScope, Right
from waferbox.security.tokens import Kind

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "security.md"
HEADING: Final = "## The table of rights\n"
ORDER: Final = (
    Kind.ADMIN,
    Kind.USER,
    Kind.VIEWER,
    Kind.JOB,
    Kind.MEMBER,
    Kind.LEASE,
    Kind.COORDINATOR,
    Kind.MANAGEMENT,
    Kind.NODE,
)
OWN: Final = {Kind.USER: "its user", Kind.JOB: "the script of that job", Kind.MEMBER: "a member of that job"}


def _who(right: Right) -> str:
    """The bearers that a method is open to, as the page names them."""
    if not right.kinds:
        return "everybody"
    names = [
        OWN[kind] if right.job_scope is not JobScope.ANY and kind in OWN else kind.value
        for kind in ORDER
        if kind in right.kinds
    ]
    return ", ".join(names)


def page() -> str:
    """The page with the current table."""
    text, found, _ = PAGE.read_text().partition(HEADING)
    assert found, f"{PAGE} has no {HEADING}"
    rows = []
    for path, right in RIGHTS.items():
        service, method = path.removeprefix("/").split("/")
        rows.append(f"| {service.rpartition('.')[2]} | {method} | {_who(right)} | {right.note} |")
    head = "| service | method | opens to a token of | and besides |\n|---|---|---|---|\n"
    return f"{text}{HEADING}\n{head}" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

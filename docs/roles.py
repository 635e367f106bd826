"""Writes the files of each role, and what each holds, into its page in docs/roles/. `python docs/roles.py`.

What a file holds is said in its first lines. The list is all that follows `## Files`, at the end of the page.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ROOT / "docs" / "roles"
FOLDERS: Final = {
    "client": ("client/cstorch", "client/cstorch/_internal"),
    "coordinator": ("appliance/coordinator",),
    "ingress": ("appliance/ingress",),
    "management": (
        "appliance/__main__.py",
        "appliance/job_history.py",
        "appliance/management",
    ),
    "memoryx": ("memoryx", "waferbox/states"),
    "node": (
        "waferbox/roles.py",
        "waferbox/runtime",
        "waferbox/launch",
        "waferbox/links",
        "waferbox/rpc",
        "waferbox/security",
        "waferbox/host",
    ),
    "swarmx": ("swarmx",),
    "vendor_gateway": ("vendor_gateway",),
    "wafer": ("wafer",),
    "worker": ("workers", "waferbox/input_process"),
}
HEADING: Final = "## Files\n"


def _files(role: str) -> Iterator[Path]:
    """Modules, and packages as a whole, that say what they are."""
    for place in FOLDERS[role]:
        path = ROOT / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            if file.name != "__init__.py":
                yield file
        yield from sorted(path.glob("*/__init__.py"))


def _said(file: Path) -> str:
    """The first paragraph of its docstring, as a cell of a table."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")


def page(role: str) -> str:
    """The page of a role, with its files as they are now."""
    text, found, _ = (PAGES / f"{role}.md").read_text().partition(HEADING)
    assert found, f"docs/roles/{role}.md has no {HEADING}"
    rows = []
    for file in _files(role):
        name = f"{file.parent.relative_to(ROOT)}/" if file.name == "__init__.py" else str(file.relative_to(ROOT))
        if said := _said(file):
            rows.append(f"| `{name}` | {said} |")
    return f"{text}{HEADING}\n| | |\n|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    for role in FOLDERS:
        (PAGES / f"{role}.md").write_text(page(role))

"""Writes the tree of folders, and what each holds, into docs/architecture.md. `python docs/folders.py`.

What a folder holds is said in the first line of its `__init__.py`. The tree is all between `## Folders` and the next
heading.
"""

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
HEADING: Final = "## Folders\n"
# In the order of a step's way: the script, the control plane, the data path, and what they share.
TOPS: Final = (
    "client/cstorch",
    "appliance",
    "vendor_gateway",
    "memoryx",
    "swarmx",
    "workers",
    "wafer",
    "waferbox",
    "nodes",
    "interconnect",
    "cirh",
    "lair",
)


def _said(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def _lines(folder: Path, depth: int) -> list[tuple[str, str]]:
    lines = [("  " * depth + (str(folder.relative_to(ROOT)) if depth == 0 else folder.name) + "/", _said(folder))]
    for inner in sorted(folder.glob("*/__init__.py")):
        lines.extend(_lines(inner.parent, depth + 1))
    return lines


def tree() -> str:
    """The folders, a line each."""
    lines = [line for top in TOPS for line in _lines(ROOT / top, 0)]
    width = max(len(name) for name, _ in lines) + 2
    text = "\n".join(f"{name:<{width}}{said}".rstrip() for name, said in lines)
    return f"```text\n{text}\n```\n"


def page() -> str:
    """docs/architecture.md, with its tree as it is now."""
    begin, found, rest = PAGE.read_text().partition(HEADING)
    assert found, f"docs/architecture.md has no {HEADING}"
    introduction = re.match(r"\n(?:[^ #\n`].*\n)*", rest)
    assert introduction is not None
    after = re.search(r"^## ", rest, re.M)
    assert after is not None
    return f"{begin}{HEADING}{introduction.group(0)}\n{tree()}\n{rest[after.start() :]}"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Writes the tree of folders, with the contents of each, into docs/architecture.md. `python docs/folders.py`.

The text of a folder is the first sentence of its `__init__.py`. The tree stands between `## Folders` and the next
heading, below the paragraph that introduces it.
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
)
# Folders whose own folders the tree shows. The rest is left out, so that the tree fits one screen.
OPENED: Final = frozenset(["client/cstorch/_internal", "appliance", "appliance/compiler", "waferbox"])
# Shown although their siblings are not: those have the names of the real API.
ADDED: Final = frozenset(["client/cstorch/_internal"])


def _description(folder: Path) -> str:
    """The first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return re.split(r"\. (?=[A-Z])", " ".join(text.partition("\n\n")[0].split()))[0].removesuffix(".")


def _lines(folder: Path, depth: int) -> list[tuple[str, str]]:
    path = str(folder.relative_to(ROOT))
    lines = [("  " * depth + (path if depth == 0 else folder.name) + "/", _description(folder))]
    for inner in sorted(init.parent for init in folder.glob("*/__init__.py")):
        if path in OPENED or str(inner.relative_to(ROOT)) in ADDED:
            lines.extend(_lines(inner, depth + 1))
    return lines


def tree() -> str:
    """The folders, a line each."""
    lines = [line for top in TOPS for line in _lines(ROOT / top, 0)]
    width = max(len(name) for name, _ in lines) + 2
    text = "\n".join(f"{name:<{width}}{description}".rstrip() for name, description in lines)
    return f"```text\n{text}\n```\n"


def page() -> str:
    """docs/architecture.md, with its tree as it is now."""
    begin, found, rest = PAGE.read_text().partition(HEADING)
    assert found, f"docs/architecture.md has no {HEADING}"
    introduction = re.match(r"\n(?:[^ #\n`].*\n)*", rest)
    assert introduction is not None
    after = re.search(r"^##+ ", rest, re.M)
    assert after is not None
    return f"{begin}{HEADING}{introduction.group(0)}\n{tree()}\n{rest[after.start() :]}"


if __name__ == "__main__":
    PAGE.write_text(page())

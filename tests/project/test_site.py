"""The documentation site builds without a warning; its links, anchors and quoted messages exist."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import cstorch

pytestmark = pytest.mark.timeout(400)  # on a busy machine

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """A page of HTML: the identifiers in it, and the addresses that it leads to or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.addresses: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.identifiers.add(found.get("id") or "")
        self.addresses.update(found[name] or "" for name in ("href", "src") if name in found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--conf-dir"]
    built = subprocess.run(
        [*command, DOCS / "site", "--doctree-dir", folder / "doctrees", DOCS, folder / "html"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 50
    broken = []
    for path, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].identifiers):
                broken.append(f"{path.relative_to(site)}: {address}")
    assert broken == []


def public_modules(module: ModuleType) -> Iterator[str]:
    """The module, and those that it exports, as far as they say themselves what they export."""
    yield module.__name__
    for name in module.__all__:
        member = getattr(module, name)
        if isinstance(member, ModuleType) and hasattr(member, "__all__"):
            yield from public_modules(member)


def test_the_reference_has_the_public_modules() -> None:
    listed = set(re.findall(r"^   (cstorch\S*)$", (DOCS / "api.rst").read_text(), re.MULTILINE))
    without_names = {"cstorch.core", "cstorch.decomp", "cstorch.lib"}  # which export modules alone
    assert set(public_modules(cstorch)) - without_names <= listed


def text_of(node: ast.AST) -> str:
    """A string as it is in the source; `...` for the expressions in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


@cache
def strings_of_the_code() -> str:
    folders = ("appliance", "client", "waferbox", "workers")
    trees = (ast.parse(path.read_text()) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(re.sub(r"%[sd]", "...", text_of(node)) for node in chain.from_iterable(map(ast.walk, trees)))


MESSAGES = [
    found[1] for found in re.findall(r"^### (`+)(.+)\1$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_troubleshooting_page_are_in_the_code(message: str) -> None:
    assert message in strings_of_the_code()


def test_the_troubleshooting_page_has_messages() -> None:
    assert len(MESSAGES) > 20

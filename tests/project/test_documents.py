"""What README and docs/ name exists: files, commands, and every word of code; links lead somewhere."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from waferbox.commands.cli import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import folders  # noqa: E402  from docs
import rights  # noqa: E402
import roles  # noqa: E402
import settings  # noqa: E402
import vendor_calls  # noqa: E402

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("*.py", "*.proto", "*.toml", "*.yml", "Makefile", "Dockerfile", ".ci/run")
FOLDERS = (
    "appliance",
    "benchmarks",
    "client",
    "deploy",
    "examples",
    "memoryx",
    "proto",
    "swarmx",
    "tests",
    "vendor_gateway",
    "wafer",
    "waferbox",
    "workers",
)

# Of other systems, of torch, and what stands for something else.
FOREIGN = frozenset(["csctl", "driver", "foo", "JOB", "KEY", "NAME", "VALUE"])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def snippets(page: Path) -> set[str]:
    """What stands in backticks."""
    return {found[1].strip() for found in re.findall(r"(`+)(.+?)\1(?!`)", prose(page), re.DOTALL)}


@cache
def words() -> frozenset[str]:
    """All words of the sources, with the names of files."""
    found: set[str] = set()
    for pattern in SOURCES:
        paths = [
            *ROOT.glob(pattern),
            *(path for folder in FOLDERS for path in (ROOT / folder).rglob(pattern)),
        ]
        for path in paths:
            found.update(re.findall(r"\w+", path.read_text()))
            found.update(re.findall(r"\w+", str(path.relative_to(ROOT))))
    return frozenset(found)


def is_path(snippet: str) -> bool:
    return bool(re.fullmatch(r"[\w.*][\w.*/-]*(/|\.(py|md|toml|proto|yml|svg|css))|[\w.]+(/[\w.*-]+)+", snippet))


def names_in(snippet: str) -> list[str]:
    """The words of a snippet that must be names of code; in a line of shell those that look like some."""
    found = re.findall(r"[A-Za-z]\w{2,}", re.sub(r"job-[0-9a-f]+", "", snippet))
    return [word for word in found if " " not in snippet or "_" in word or word.lower() != word]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_of_code_exist(page: Path) -> None:
    for snippet in snippets(page):
        if is_path(snippet):
            assert any(ROOT.glob(snippet)), f"{name_of(page)}: there is no {snippet} (from the root)"
        elif page.name not in ("compatibility.md", "operators.md"):  # generated: names of the real API, and of torch
            gone = [word for word in names_in(snippet) if word not in words() | FOREIGN]
            assert not gone, f"{name_of(page)}: `{snippet}` has words that no source has: {', '.join(gone)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{name_of(page)}: there is no {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{name_of(page)}: {linked.name} has no {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    commands = group.commands
    text = page.read_text()
    for command in re.findall(r"(?:^    |`)waferbox ([a-z][\w-]*)", text, re.MULTILINE):
        assert command in commands, f"{name_of(page)}: there is no `waferbox {command}`"
    for module in re.findall(r"python -m ([a-z]\w*(?:\.\w+)*)", text):
        path = ROOT / module.replace(".", "/")
        known = path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module == "pip"
        assert known, f"{name_of(page)}: there is no module {module}"
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no `make {target}`"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def walks() -> dict[str, str]:
    """The walks of docs/architecture.md: the title of each, and its text."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Five walks through the code\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\d\. \*\*(.+?)\.\*\* (.+?)(?=^\d\. |\Z)", section, re.DOTALL | re.MULTILINE)
    return dict(found)


def test_there_are_five_walks() -> None:
    assert len(walks()) == 5


@pytest.mark.parametrize("walk", walks())
def test_a_walk_opens_at_most_three_files_which_define_what_it_names(walk: str) -> None:
    paths = [snippet for snippet in re.findall(r"`([^`]+)`", walks()[walk]) if is_path(snippet)]
    assert 1 < len(set(paths)) <= 3, f"{walk}: {paths}"
    for name, path in re.findall(r"`([\w.]+)` in\s+`([^`]+)`", walks()[walk]):
        text = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(class|def) {part}\b", text, re.MULTILINE), f"{walk}: no {part} in {path}"


def test_the_tree_of_folders_is_current() -> None:
    assert folders.PAGE.read_text() == folders.page(), "stale: run `python docs/folders.py`"


def test_the_table_of_rights_is_the_one_that_servers_check() -> None:
    assert rights.PAGE.read_text() == rights.page(), "stale: run `python docs/rights.py`"


def test_the_page_of_settings_has_all_environment_variables() -> None:
    assert settings.PAGE.read_text() == settings.page(), "stale: run `python docs/settings.py`"


@pytest.mark.parametrize("role", roles.FOLDERS)
def test_the_page_of_a_role_has_its_files_as_they_are(role: str) -> None:
    text = (ROOT / "docs" / "roles" / f"{role}.md").read_text()
    assert text == roles.page(role), "stale: run `python docs/roles.py`"
    assert len(text.partition(roles.HEADING)[0].splitlines()) <= 65


@pytest.mark.parametrize(
    "script", sorted(path for kind in ("py", "ipynb") for path in (ROOT / "examples").rglob(f"*.{kind}")), ids=name_of
)
def test_examples_run_in_the_tests(script: Path) -> None:
    if script.suffix == ".py" and '__name__ == "__main__"' not in script.read_text():
        return  # a module of those that are run
    tests = [path.read_text() for path in (ROOT / "tests" / "integration").glob("test_*.py")]
    assert any(script.parent.name in text and script.name in text for text in tests), f"no test runs {script.name}"


def test_the_table_of_the_vendors_calls_is_what_the_gateway_serves() -> None:
    assert vendor_calls.PAGE.read_text() == vendor_calls.page(), "stale: run `python docs/vendor_calls.py`"


def test_no_message_names_a_file_of_the_documents() -> None:
    """An installed wheel has none."""
    for folder in ("client", "waferbox", "appliance", "memoryx", "swarmx", "wafer", "workers", "vendor_gateway"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"docs/\w+\.md", text):
                continue
            tree = ast.parse(text)
            comments = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in comments:
                    assert not re.search(r"docs/\w+\.md", node.value), f"{path}:{node.lineno}"

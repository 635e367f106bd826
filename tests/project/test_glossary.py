"""What the glossary names is in the tree: paths, modules, classes, messages, and their members."""

import ast
import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
# Import roots: the repository, and the folders that hold packages of their own.
SOURCES = (ROOT, ROOT / "client", ROOT / "proto")
PACKAGES = ("appliance", "client", "memoryx", "swarmx", "vendor_gateway", "wafer", "waferbox", "workers")

Names = dict[str, set[str]]


def entries() -> dict[str, str]:
    """The text of each term."""
    found = re.findall(r"^\* \*\*(.+?)\*\*: (.+?)(?=^\* |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


def _add_message(names: Names, message: Descriptor) -> None:
    names[message.name].update(message.fields_by_name)
    for inner in message.nested_types:
        _add_message(names, inner)


def _add_messages(names: Names) -> None:
    for path in (ROOT / "proto" / "wsc" / "v1").glob("*.proto"):
        file = importlib.import_module(f"wsc.v1.{path.stem}_pb2").DESCRIPTOR
        for message in file.message_types_by_name.values():
            _add_message(names, message)
        for enum in file.enum_types_by_name.values():
            names[enum.name].update(enum.values_by_name)
        for service in file.services_by_name.values():
            names[service.name].update(service.methods_by_name)


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module or of a class defines."""
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case _:
            return set()


def _add_classes(names: Names) -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ast.parse(path.read_text())
            for statement in module.body:
                for name in _bound(statement):
                    names[name]  # also those without members
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    names[node.name].update(*map(_bound, node.body))


@cache
def names() -> Names:
    """Every class, message and top-level name of the product, with its members."""
    found: Names = defaultdict(set)
    _add_messages(found)
    _add_classes(found)
    return dict(found)


def _module(name: str) -> Path | None:
    """The file of a module or package; None if there is none."""
    path = name.replace(".", "/")
    files = [root / file for root in SOURCES for file in (f"{path}.py", f"{path}/__init__.py")]
    return next((file for file in files if file.is_file()), None)


def exists(span: str) -> bool:
    """Whether a code span names a path, a module, a class or message, or a member of one."""
    if "/" in span:
        return (ROOT / span).exists()
    if _module(span):
        return True
    owner, _, member = span.rpartition(".")
    if not owner:
        return span in names() or any(span in members for members in names().values())
    if module := _module(owner):
        return re.search(rf"\b{member}\b", module.read_text()) is not None
    return member in names().get(owner, ())


def identifiers(text: str) -> list[str]:
    """The code spans that are identifiers or paths; not commands, nor names of members such as `wafer-0`."""
    spans = re.findall(r"`([^`]+)`", text)
    return [span for span in spans if "/" in span or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", span)]


@pytest.mark.parametrize("term", entries())
def test_what_a_term_names_exists(term: str) -> None:
    gone = [span for span in identifiers(entries()[term]) if not exists(span)]
    assert not gone, f"the glossary says that {term} is {', '.join(gone)}, which the tree does not have"


def test_every_term_but_one_names_code() -> None:
    assert len(entries()) >= 30
    without = [term for term, text in entries().items() if "*Code*:" not in text]
    assert without == ["place"]


@pytest.mark.parametrize(
    "span", ["NoSuchClass", "Epoch.no_such_member", "waferbox/no_such_file.py", "waferbox.nothing"]
)
def test_a_name_that_is_gone_is_noticed(span: str) -> None:
    assert not exists(span)

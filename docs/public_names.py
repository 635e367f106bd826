"""Writes public_names.toml: which names of the API the public scripts of a release use, and as what.

    python docs/public_names.py 2.10.0=FOLDER 2.2.1=FOLDER ...

FOLDER is a checkout of the public Model Zoo of that release. Only names and the form of their uses are kept: facts, and
no line of code.
"""

import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).with_name("public_names.toml")

ROOTS = (
    "cerebras.appliance",
    "cerebras.framework.torch",
    "cerebras.pb",
    "cerebras.pytorch",
    "cerebras.workflow",
    "cerebras_appliance",
    "cerebras_pytorch",
)

# What scripts of releases before 2.0 import from their own package, which has it from the API.
PASSED_ON = {
    "amp": "amp",
    "cb_model": "core.cb_model",
    "cbtorch": "",
    "modes": "core.modes",
    "name_scope": "core.name_scope",
}

HEAD = """# Which names of the API the public scripts of each release use, and as what. Written by docs/public_names.py.
#
# "module": it is imported as one; "class": it is a base, or caught; "decorator"; "call(2, a, b)": called with two
# arguments by position and these by name, "...": and others that are unpacked; "value": anything else.
"""


class Uses(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, found: dict[str, set[str]], root: str) -> None:
        self.found = found
        self.root = root  # of what the scripts' own package passes on
        self.names: dict[str, str] = {}  # of a name in the file: what it stands for

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if _is_api(each.name):
                self.note(each.name, "module")
                root = each.name.partition(".")[0]
                self.names[each.asname or root] = each.name if each.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names if node.level == 0 else ():
            full = f"{node.module}.{each.name}"
            if _is_api(full) and each.name != "*":
                self.note(full, "value")
                self.names[each.asname or each.name] = full
            elif node.module == "modelzoo.common.pytorch" and each.name in PASSED_ON:
                place = PASSED_ON[each.name]
                self.names[each.asname or each.name] = f"{self.root}.{place}".rstrip(".")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self.note_node(base, "class")
        self.visit_decorators(node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_decorators(node)
        self.generic_visit(node)

    def visit_decorators(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            self.note_node(decorator, "decorator")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for kind in node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]:
            self.note_node(kind, "class")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        positions = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        keywords = sorted(keyword.arg for keyword in node.keywords if keyword.arg)
        is_open = len(positions) < len(node.args) or len(keywords) < len(node.keywords)
        form = ", ".join([str(len(positions)), *keywords, *(["..."] if is_open else [])])
        self.note_node(node.func, f"call({form})")
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            for kind in kinds:
                self.note_node(kind, "class")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self.note_node(node, "value"):
            self.generic_visit(node)

    def note_node(self, node: ast.AST | None, use: str) -> bool:
        """Notes the use of what an expression names; whether it names something of the API."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.names:
            return False
        self.note(".".join([self.names[node.id], *reversed(parts)]), use)
        return True

    def note(self, name: str, use: str) -> None:
        if _is_api(name):
            self.found.setdefault(name, set()).add(use)


def _is_api(name: str) -> bool:
    return any(f"{name}.".startswith(f"{root}.") for root in ROOTS)


def trees_in(folder: Path) -> Iterator[ast.Module]:
    """The files of a checkout that are Python, parsed."""
    for file in sorted(folder.rglob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue  # a template, or for Python 2
        yield tree


def uses_in(folder: Path) -> dict[str, set[str]]:
    """The uses in all files of a checkout."""
    found: dict[str, set[str]] = {}
    passing_on = folder / "modelzoo" / "common" / "pytorch" / "__init__.py"
    has_torch = passing_on.exists() and "cerebras.framework.torch" in passing_on.read_text()
    root = "cerebras.framework.torch" if has_torch else "cerebras_pytorch"
    for tree in trees_in(folder):
        uses = Uses(found, root)
        for node in ast.walk(tree):  # names first: they may be imported in a function
            if isinstance(node, ast.Import | ast.ImportFrom):
                uses.visit(node)
        uses.visit(tree)
    return found


def lines(release: str, found: dict[str, set[str]]) -> Iterator[str]:
    """The table of a release."""
    yield f'\n["{release}"]'
    for name, uses in sorted(found.items()):
        kept = sorted(uses - {"value"}) or ["value"]
        yield f'"{name}" = [{", ".join(map(quoted, kept))}]'


def quoted(text: str) -> str:
    return f'"{text}"'


if __name__ == "__main__":
    text = HEAD
    for release, _, folder in (argument.partition("=") for argument in sys.argv[1:]):
        text += "".join(f"{line}\n" for line in lines(release, uses_in(Path(folder))))
    TARGET.write_text(text)

"""Writes public_attributes.toml: which attributes of the API's objects public scripts read, set or call.

    python docs/public_attributes.py 2.10.0=FOLDER 2.2.1=FOLDER ...

FOLDER is a checkout of the public Model Zoo of that release. Names of modules are in public_names.toml; here is what
scripts ask of the objects that these names give: `current_executor().cs_config.precision_opt_level`. Which object an
expression stands for is known from the call that makes it, from an annotation, or from the name that all scripts give
it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from public_names import Uses, quoted, trees_in

TARGET = Path(__file__).with_name("public_attributes.toml")

# The kind of object that a call of the API returns, by the last part of its name.
MADE_BY = {
    "CSConfig": "cs_config",
    "ClusterConfig": "cluster_config",
    "DataExecutor": "executor",
    "DataLoader": "dataloader",
    "GradScaler": "grad_scaler",
    "backend": "backend",
    "current_backend": "backend",
    "current_backend_impl": "backend",
    "current_executor": "executor",
    "env": "environment",
    "service_resolver": "resolver",
    "state": "state",
}

# What scripts call such an object, also where it comes to them as an argument.
CALLED = {
    "_cs_config": "cs_config",
    "_executor": "executor",
    "backend": "backend",
    "cluster_config": "cluster_config",
    "cs_config": "cs_config",
    "executor": "executor",
    "grad_scaler": "grad_scaler",
}

HEAD = """# Which attributes of the API's objects public scripts use, and of which releases.
# Written by docs/public_attributes.py.
#
# By the kind of object: dotted names that are read, set ("=" behind it) or called ("()" behind it).
"""


class Attributes(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, names: dict[str, str], found: dict[str, set[str]]) -> None:
        self.names = names  # of a name in the file: which name of the API it stands for
        self.found = found
        self.kinds: dict[str, str] = {}  # of variables, `self.x` included

    def learn(self, tree: ast.AST) -> None:
        """Finds out which variables of a file stand for which kind of object."""
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=ast.Call() as call):
                    self._bind(targets, self._made_by(call))
                case ast.AnnAssign(target=target, annotation=annotation):
                    self._bind([target], self._named(annotation))
                case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                    self._bind([ast.Name(name)], self._named(annotation))

    def _bind(self, targets: list[ast.expr], kind: str | None) -> None:
        if kind is not None:
            self.kinds.update({ast.unparse(target): kind for target in targets})

    def _made_by(self, call: ast.Call) -> str | None:
        return self._named(call.func)

    def _named(self, node: ast.expr) -> str | None:
        """The kind that a name of the API makes."""
        text = ast.unparse(node).strip("'\"")
        root, _, rest = text.partition(".")
        if root not in self.names:
            return None
        return MADE_BY.get(f"{self.names[root]}.{rest}".rstrip(".").rpartition(".")[2])

    def _kind_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Call):
            return self._made_by(node)
        text = ast.unparse(node)
        if text in self.kinds:
            return self.kinds[text]
        name = text.rpartition(".")[2]
        is_variable = isinstance(node, ast.Name | ast.Attribute) and text.partition(".")[0] not in self.names
        return CALLED.get(name) if is_variable else None

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Attribute) and self._note(node.func, "()")):
            self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._note(node, "" if isinstance(node.ctx, ast.Load) else "="):
            self.generic_visit(node)

    def _note(self, node: ast.Attribute, use: str) -> bool:
        parts: list[str] = []
        holder: ast.expr = node
        while isinstance(holder, ast.Attribute):
            parts.insert(0, holder.attr)
            holder = holder.value
            kind = self._kind_of(holder)
            if kind is not None and parts[0] not in ("get", "pop"):  # some scripts keep their YAML in such a variable
                self.found.setdefault(kind, set()).add(".".join(parts) + use)
                return True
        return False


def attributes_in(folder: Path) -> dict[str, set[str]]:
    """The uses in all files of a checkout that import the API."""
    found: dict[str, set[str]] = {}
    for tree in trees_in(folder):
        uses = Uses({}, "cerebras_pytorch")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                uses.visit(node)
        if uses.names:
            attributes = Attributes(uses.names, found)
            attributes.learn(tree)
            attributes.visit(tree)
    return found


def lines(found: dict[str, dict[str, set[str]]]) -> Iterator[str]:
    """The tables of all kinds. found: by release."""
    for kind in sorted({kind for kinds in found.values() for kind in kinds}):
        yield f"\n[{kind}]"
        for name in sorted({name for kinds in found.values() for name in kinds.get(kind, ())}):
            releases = [release for release, kinds in found.items() if name in kinds.get(kind, ())]
            yield f'"{name}" = [{", ".join(map(quoted, releases))}]'


if __name__ == "__main__":
    folders = dict(argument.split("=", 1) for argument in sys.argv[1:])
    found = {release: attributes_in(Path(folder)) for release, folder in folders.items()}
    TARGET.write_text(HEAD + "".join(f"{line}\n" for line in lines(found)))

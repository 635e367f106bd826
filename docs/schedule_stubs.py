"""Writes the stub files of the modules whose schedule classes are made from a table.

    python docs/schedule_stubs.py

A type checker cannot see a class that a call makes. The stub of a module repeats the signature of each such class; the
other names of the module are re-exported or copied from its source.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cstorch.optim.scheduler_base import Scheduler

MODULES = (
    "cerebras_pytorch.optim.lr_scheduler",
    "cstorch.optim.lr_scheduler",
    "cstorch.optim.weight_decay_scheduler",
)

HEAD = '''"""The types of {module}. Written by docs/schedule_stubs.py."""

from abc import ABCMeta
from typing import Any

import torch

{imports}from cstorch.optim import scheduler
from cstorch.optim.scheduler_base import Scheduler as Scheduler
from cstorch.optim.scheduler_base import Tags

'''


def stub(module: ModuleType) -> str:
    """Returns the text of the stub file of a module."""
    is_older = module.__name__.startswith("cerebras_pytorch.")
    imports = "from cstorch.optim import lr_scheduler\n" if is_older else ""
    head, parts = [HEAD.format(module=module.__name__, imports=imports)], []
    kinds = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, Scheduler)}
    written = {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}
    for name, kind in kinds.items():
        if kind.__module__ == module.__name__:
            parts.append("\n".join(_class(kind, written.get(name))))
        elif name != "Scheduler":
            head.append(f"{name} = scheduler.{kind.__name__}\n")
    if is_older:
        parts.append("def __getattr__(name: str) -> Any: ...\n")
    return "\n".join(["".join(head), *parts])


def _class(kind: type[Any], node: ast.ClassDef | None) -> Iterator[str]:
    """The declaration of a class: with one constructor if it is made, and with what its source has if it is written."""
    bases = [_base(base, kind.__module__) for base in kind.__bases__]
    yield f"class {kind.__name__}({', '.join([*bases, *(['metaclass=ABCMeta'] if inspect.isabstract(kind) else [])])}):"
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)] if node else []
    if node is None:
        yield from (f"    {name}: Any" for name in kind._other_names() if name in vars(kind))
        yield f"    def __init__{_signature(kind)} -> None: ..."
        own = (name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_"))
        yield from (f"    def {name}(self) -> Any: ..." for name in own if not hasattr(kind.__bases__[0], name))
    for function in functions:
        yield from (f"    @{ast.unparse(decorator)}" for decorator in function.decorator_list)
        returned = ast.unparse(function.returns) if function.returns else "Any"
        yield f"    def {function.name}({ast.unparse(function.args)}) -> {returned}: ..."
    if node is not None and not functions:
        yield "    pass"
    yield ""


def _base(base: type[Any], module: str) -> str:
    if base.__module__ == module or base is Scheduler:
        return base.__name__
    return f"{'scheduler' if base.__module__ == 'cstorch.optim.scheduler' else 'lr_scheduler'}.{base.__name__}"


def _signature(kind: type[Any]) -> str:
    parameters = inspect.signature(kind.__init__).parameters.values()
    return f"({', '.join(_parameter(parameter, kind.__module__) for parameter in parameters)})"


def _parameter(parameter: inspect.Parameter, module: str) -> str:
    if parameter.name == "self":
        return "self"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {_type(parameter, module)}{default}"


def _type(parameter: inspect.Parameter, module: str) -> str:
    if parameter.name == "param_group_tags":
        return "Tags"
    if parameter.annotation is torch.optim.Optimizer:
        return "torch.optim.Optimizer"
    text = inspect.formatannotation(parameter.annotation)
    return re.sub(rf"({re.escape(module)}|cstorch\.optim\.scheduler_base)\.", "", text)


if __name__ == "__main__":
    for name in MODULES:
        loaded = import_module(name)
        Path(inspect.getfile(loaded)).with_suffix(".pyi").write_text(stub(loaded))

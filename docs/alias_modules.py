"""Writes the modules of `cerebras.pytorch`, another name of `cstorch`, for editors and type checkers.

    python docs/alias_modules.py

At run time an alias imports those of cstorch in their place (cstorch._internal.generations), which no type checker
follows. Those that the real API has are written.
"""

import shutil
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

SURFACE: Final = Path(__file__).parent / "reference_surface.toml"
PREFIX: Final = "cerebras.pytorch."
FOLDER: Final = Path(__file__).parents[1] / "client/cerebras/pytorch"
TEXT: Final = '''"""Another name of {module}, for type checkers alone. Written by docs/alias_modules.py."""

from {module} import *
'''


def modules() -> Mapping[Path, str]:
    """Returns the text of each module, by its path in the folder of cerebras.pytorch."""
    surface = tomllib.loads(SURFACE.read_text())
    names = {name.removeprefix(PREFIX) for name in surface if name.startswith(PREFIX)}
    packages = {name.rpartition(".")[0] for name in names if _module(name)} - {""}
    return {
        _path(name, is_package=name in packages): TEXT.format(module=module)
        for name in sorted(names | packages)
        if (module := _module(name))
    }


def _module(name: str) -> str:
    """Returns the name of the module of cstorch; empty if there is none."""
    try:
        return import_module(f"cstorch.{name}").__name__
    except ImportError:
        return ""


def _path(name: str, *, is_package: bool) -> Path:
    path = Path(*name.split("."))
    return path / "__init__.py" if is_package else path.with_suffix(".py")


def main() -> None:
    for entry in FOLDER.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "__init__.py":
            entry.unlink()
    for path, text in modules().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text)


if __name__ == "__main__":
    main()

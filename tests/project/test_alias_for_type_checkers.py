"""The modules of cerebras.pytorch for type checkers are those that the generator writes, and none is run."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import alias_modules  # noqa: E402  from docs


def test_the_modules_are_current() -> None:
    found = {path.relative_to(alias_modules.FOLDER): path.read_text() for path in alias_modules.FOLDER.rglob("*.py")}
    del found[Path("__init__.py")]
    assert found == alias_modules.modules(), "stale: run `python docs/alias_modules.py`"


def test_an_import_gives_the_module_of_cstorch() -> None:
    for path in alias_modules.modules():
        name = ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)
        module = importlib.import_module(f"cerebras.pytorch.{name}")
        assert module.__name__.startswith("cstorch."), name
        assert module is importlib.import_module(f"cstorch.{name}")

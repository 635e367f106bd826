"""`cerebras.pytorch` is another name of `cstorch`: the same module objects, whichever is imported first.

After the import of this file `sys.modules["cerebras.pytorch"]` is cstorch itself, and so for every submodule.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_ALIAS = "cerebras.pytorch"
_REAL = "cstorch"


class _AliasFinder(MetaPathFinder, Loader):
    """Imports cerebras.pytorch.x as cstorch.x."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_ALIAS}.") or find_spec(_real_name(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what it then finds in sys.modules; the module it made itself is thrown away, and the
        # real one keeps its own name, spec and loader.
        sys.modules[module.__name__] = import_module(_real_name(module.__name__))


def _real_name(alias: str) -> str:
    return _REAL + alias.removeprefix(_ALIAS)


sys.meta_path.insert(0, _AliasFinder())
sys.modules[_ALIAS] = import_module(_REAL)

"""Other import names of cstorch, older generations of its API, and the form of torch that these expect."""

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils import _pytree

from cstorch._internal import absent

# --- Import names -----------------------------------------------------------------------------------------------------
#
# `alias` makes a name another name of a package: the same module objects, whichever is imported first. `inherit` is for
# an older generation: a package that has only the modules in which it differs from cstorch. All other modules and
# attributes are cstorch's.

logger = logging.getLogger("cstorch")

NAMES = (
    "cerebras.appliance",
    "cerebras.framework",
    "cerebras.pytorch",
    "cerebras_appliance",
    "cerebras_pytorch",
    "cerebras_torch",
)

# Modules of the real system, and the modules of this package that have their contents.
_MOVED = {
    "cstorch.backend.ltc_backend": "cstorch._internal.session.tensor_hooks",
    "cstorch.sparse.gmp": "cstorch.sparse.algorithms",
    "cstorch.sparse.rigl": "cstorch.sparse.algorithms",
    "cstorch.sparse.set": "cstorch.sparse.algorithms",
    "cstorch.sparse.utils": "cstorch.sparse.schedules",
    "cstorch.utils.data.utils": "cstorch.utils.data",
    "cstorch.utils.step_closures": "cstorch.core.closures",
}

_OWN = Path(__file__).resolve().parents[2]


class _Finder(MetaPathFinder, Loader):
    """The finder and loader that import modules under another name of a package as those of its real name."""

    def __init__(self) -> None:
        self.real_packages = {name: name for name in ("cstorch", "cerebras_appliance")}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = self._real_name(fullname)
        if real == fullname:
            if (reason := absent.reason(real)) is not None and PathFinder.find_spec(fullname, path) is None:
                raise ImportError(reason, name=fullname)
            return None
        if real is None:
            return None
        parent = fullname.rpartition(".")[0]
        if sys.modules[parent].__name__ == parent and (own := PathFinder.find_spec(fullname, path)) is not None:
            return own  # a module in which an older generation differs
        if (reason := absent.reason(fullname)) is not None:
            raise ImportError(reason, name=fullname)
        return None if find_spec(real) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system discards its own module for the one in sys.modules, which keeps its name, spec and loader.
        real = self._real_name(module.__name__)
        assert real is not None
        sys.modules[module.__name__] = import_module(real)

    def _real_name(self, name: str) -> str | None:
        """Returns the real name of a module; None for a module of another package."""
        prefix = name
        while prefix not in self.real_packages:
            prefix, dot, _ = prefix.rpartition(".")
            if not dot:
                return None
        real = self.real_packages[prefix] + name.removeprefix(prefix)
        return _MOVED.get(real, real)


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def alias(name: str, real: str) -> None:
    """Makes `name` another name of the package `real` and of its submodules."""
    _finder.real_packages[name] = real
    sys.modules[name] = import_module(real)
    _keep_functions(name, real)


def inherit(name: str, real: str) -> Callable[[str], Any]:
    """Makes the package `name` of an older generation inherit all that it does not define from `real`.

    Returns:
        The `__getattr__` of the package.
    """
    _finder.real_packages[name] = real
    module = import_module(real)
    _keep_functions(name, real)

    def get(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__version__":
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if absent.reason(f"{name}.{attribute}") is not None:
            raise absent.error(name, attribute)
        return getattr(module, attribute)

    return get


def _keep_functions(name: str, real: str) -> None:
    """Registers the modules whose names are functions in their packages, such as `backend`.

    Otherwise the import of `name.backend` would bind the module in the package, and hide the function.
    """
    for loaded, module in list(sys.modules.items()):
        package, _, child = loaded.rpartition(".")
        if not f"{package}.".startswith(f"{real}."):
            continue
        parent = sys.modules.get(package)
        if parent is None or getattr(parent, child, module) is not module:
            sys.modules[name + loaded.removeprefix(real)] = module


def warn_of_other_providers() -> None:
    """Warns of other distributions that provide an import name of this one, and names the one that is imported."""
    entries = [entry for entry in map(Path, sys.path) if not (entry / "cstorch").is_dir()]
    for name in NAMES:
        others = [folder for entry in entries if (folder := entry.joinpath(*name.split("."))).is_dir()]
        if not others:
            continue
        top = find_spec(name.partition(".")[0])
        is_ours = top is not None and top.origin is not None and _OWN in Path(top.origin).resolve().parents
        ours, other = _OWN.joinpath(*name.split(".")), others[0]
        winner, loser = (ours, other) if is_ours else (other, ours)
        logger.warning(
            "two distributions provide the import name %s: %s is imported, %s is not. Uninstall the one that you do "
            "not want, or put the other's folder first on PYTHONPATH",
            name,
            winner,
            loser,
        )


# --- TreeSpec ---------------------------------------------------------------------------------------------------------
#
# Scripts of public releases call `dataclasses.replace(spec, children_specs=...)`, which passes each field to the
# constructor by its name. The parameters have these names in torch 2.4, and others in newer versions.

_NOT_GIVEN = object()
_tree_spec_init = _pytree.TreeSpec.__init__


def _accept_fields(
    self: _pytree.TreeSpec,
    type: Any,
    context: Any = _NOT_GIVEN,
    children_specs: Any = _NOT_GIVEN,
    *,
    _context: Any = None,
    _children: Any = None,
) -> None:
    _tree_spec_init(
        self,
        type,
        _context if context is _NOT_GIVEN else context,
        _children if children_specs is _NOT_GIVEN else children_specs,
    )


def accept_tree_spec_fields() -> None:
    """Makes the constructor of TreeSpec also take its fields by their names."""
    _pytree.TreeSpec.__init__ = _accept_fields  # type: ignore[method-assign]

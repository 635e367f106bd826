"""Whether another process with the same search path could import a module, or only this one has it."""

import sys
from collections.abc import Sequence
from types import ModuleType


def can_be_imported(module: ModuleType) -> bool:
    """Returns whether the import of a module's name would find the module in another process.

    It would not find one that the script has made: from a file of another name or in a folder that is not on the search
    path, by `runpy`, or as the main module of a process that multiprocessing has spawned.

    Args:
        module: A module of sys.modules.
    """
    name, spec = module.__name__, getattr(module, "__spec__", None)
    package, _, last = name.rpartition(".")
    if name == "__main__" or name.partition(".")[0] in sys.stdlib_module_names:
        return True  # whoever pickles __main__ knows what it is
    if spec is None or spec.loader is None:
        # Code in Python has brought this name, so the module is not one that an extension has made.
        return "__builtins__" not in vars(module)
    path: Sequence[str] = sys.path
    if package:
        parent = sys.modules.get(package)
        if parent is None or not can_be_imported(parent):
            return False
        path = getattr(parent, "__path__", ())
    if any(spec.origin in (f"{folder}/{last}.py", f"{folder}/{last}/__init__.py") for folder in path):
        return True
    for finder in sys.meta_path:
        found = finder.find_spec(name, [*path] if package else None)
        if found is not None and found is not spec:  # some finders look into sys.modules
            return found.origin == spec.origin
    return False

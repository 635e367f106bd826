"""The installation that a process belongs to, before modules of the same names in a script's folder or PYTHONPATH.

`python -P .../waferbox/launch/installation.py MODULE [ARGUMENT ...]` runs main() of a module of this installation,
whatever the folder it is run in and PYTHONPATH hold.
"""

import importlib
import importlib.util
import os
import sys
import sysconfig
from typing import Final

# In a wheel all packages lie side by side; in a checkout these have folders of their own.
_ELSEWHERE: Final = ("cstorch", "wsc")


def roots() -> list[str]:
    """The folders that hold the packages of this installation."""
    found = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    for package in _ELSEWHERE:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        found.append(os.path.dirname(os.path.abspath(spec.submodule_search_locations[0])))
    return list(dict.fromkeys(found))


def put_first() -> None:
    """Search the standard library, this installation, the site, and only then a script's folder and PYTHONPATH.

    To be called by each process of a cluster, and by the command, before they import a package of a process kind.
    """
    library, shared = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    standard = [
        entry
        for entry in sys.path
        if entry in (library, shared, os.path.join(shared, "lib-dynload")) or os.path.basename(entry) == archive
    ]
    if not standard:
        return  # an interpreter that is laid out in another way; its own order is the best guess
    begin = sys.path.index(standard[0])
    own = roots()
    given, site = [
        [entry for entry in part if entry not in (*standard, *own)] for part in (sys.path[:begin], sys.path[begin:])
    ]
    sys.path[:] = [*standard, *own, *site, *given]


def python_command(module: str) -> list[str]:
    """The command that runs main() of a module of this installation in a Python of its own."""
    return [sys.executable, "-P", os.path.abspath(__file__), module]


def main() -> int:
    del sys.argv[0]
    put_first()
    return int(importlib.import_module(sys.argv[0]).main())


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.exit(main())

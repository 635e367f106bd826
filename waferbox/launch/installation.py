"""The installation of a process: its packages come first, whatever a script's folder and PYTHONPATH contain.

`python -P .../waferbox/launch/installation.py MODULE [ARGUMENT ...]` runs main() of a module of this installation. A
script, since `python -m` would search PYTHONPATH for the package `waferbox`.
"""

import importlib
import os
import sys
import sysconfig
from collections.abc import Collection, Mapping
from typing import Final

_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# In a wheel all packages lie side by side. In a checkout, some have a folder of their own: the folder, and one of them.
_CHECKOUT_FOLDERS: Final = (("client", "cstorch"), ("proto", "wsc"))

# gRPC logs each broken connection on standard error, and reads this variable when it is imported.
_GRPC_VARIABLE: Final = "GRPC_VERBOSITY"
_GRPC_QUIET: Final = "NONE"


def begin_process() -> None:
    """Prepares a process of a cluster, or of the command, before it imports gRPC or a package of a process kind.

    A user's script never calls this function: the order of its path and the log of its gRPC are its own.
    """
    put_first()
    os.environ.setdefault(_GRPC_VARIABLE, _GRPC_QUIET)


def put_first() -> None:
    """Orders sys.path: the standard library, this installation, the site, then a script's folder and PYTHONPATH."""
    library, shared = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    standard = [
        entry
        for entry in sys.path
        if entry in (library, shared, os.path.join(shared, "lib-dynload")) or os.path.basename(entry) == archive
    ]
    if not standard:
        return  # the layout of the interpreter is unknown, so its own order is the best guess
    begin = sys.path.index(standard[0])
    own = roots(_ROOT)
    given, site = [
        [entry for entry in part if entry not in (*standard, *own)] for part in (sys.path[:begin], sys.path[begin:])
    ]
    sys.path[:] = [*dict.fromkeys(standard), *own, *site, *given]


def roots(root: str) -> list[str]:
    """Folders that hold the packages of an installation whose package `waferbox` is in `root`."""
    folders = [os.path.join(root, folder) for folder, package in _CHECKOUT_FOLDERS if _holds(root, folder, package)]
    return [root, *folders]


def _holds(*parts: str) -> bool:
    return os.path.isfile(os.path.join(*parts, "__init__.py"))


def python_command(module: str) -> list[str]:
    """The command that runs main() of a module of this installation in a Python of its own."""
    return [sys.executable, "-P", os.path.abspath(__file__), module]


def begin_user_code(packages: Collection[str]) -> None:
    """Takes back, in a process that is about to run a user's code, what that code would notice of the role.

    Args:
        packages: the packages of the roles, which are removed: a user's modules may have their names.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]
    environment = user_environment(os.environ)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


def user_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a user's program that a process of the cluster, or the command, starts."""
    return {name: value for name, value in environment.items() if (name, value) != (_GRPC_VARIABLE, _GRPC_QUIET)}


def main() -> int:
    del sys.argv[0]
    begin_process()
    return int(importlib.import_module(sys.argv[0]).main())


if __name__ == "__main__":
    sys.path.insert(0, _ROOT)
    sys.exit(main())

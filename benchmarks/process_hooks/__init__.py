"""Hooks in the processes of a cluster, for benchmarks and tests; the product has none. See sitecustomize.py."""

import os
from pathlib import Path


def hook_variables(hook: Path) -> dict[str, str]:
    """The environment of a process whose cluster calls a hook in each of its processes.

    Args:
        hook: a Python file with a function install(module), which is called with the module that a process is for.
    """
    folder = str(Path(__file__).parent)
    given = os.environ.get("PYTHONPATH", "")
    return {"PROCESS_HOOK": str(hook), "PYTHONPATH": folder + (os.pathsep + given if given else "")}

"""Lets tests and benchmarks change what the processes of a cluster do, without a hook in the product.

Each Python that starts with this folder in PYTHONPATH imports this module. PROCESS_HOOK names a Python file, whose
install(module) is called in each process of a cluster before the module that the process is for is imported.
"""

import os
import runpy
import traceback
from collections.abc import Sequence

if "PROCESS_HOOK" in os.environ:
    from waferbox.launch import process

    run_module = process.run_module

    def run_hooked(module: str, argv: Sequence[str]) -> int:
        """Calls the hook, then does what run_module does. A hook that raises ends the process."""
        try:
            runpy.run_path(os.environ["PROCESS_HOOK"])["install"](module)
        except Exception:  # noqa: BLE001 - the last frame of a process
            traceback.print_exc()
            return 1
        return run_module(module, argv)

    process.run_module = run_hooked

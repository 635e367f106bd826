"""A script that runs this package under an interpreter without Waferbox."""

import ctypes
import importlib
import importlib.util
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PACKAGE = "_waferbox_child"

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    sys.exit(importlib.import_module(f"{_PACKAGE}.__main__").main())

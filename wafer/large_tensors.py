"""Memory for a wafer's large tensors: kept from step to step, within a limit. See large_tensors.cpp.

The library is C++, since torch has its memory from an object of C++; it is compiled where it runs, as generated kernels
are, when a plan first has large activations.
"""

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

from waferbox.host.folders import cache_root
from waferbox.lair.library import NotBuilt, load
from waferbox.runtime.logs import advise

SOURCE: Final = Path(__file__).with_name("large_tensors.cpp")
FOLDER: Final = "memory"  # in the cache folder
# With less at a time it does not matter what the C library's allocator adds.
SMALL_BYTES: Final = 16 << 20
# Beyond the plan, which counts gaps as models have them on average: to give pages back within a step costs a quarter of
# GPT-2's rate.
MORE_GAPS: Final = 0.075


def limit_large_tensors(nbytes: int) -> None:
    """From now on large tensors, and the memory that is kept for them, take so much, or what they need if that is more.

    nbytes: what they need at once by plan; MORE_GAPS come on top.

    Where the library cannot be built, the job's user is told; memory is the C library's then, which takes more.
    """
    if nbytes >= SMALL_BYTES:
        library = _library()
        if library is not None:
            library.limit(round(nbytes * (1 + MORE_GAPS)))


def release_large_tensors() -> None:
    """No memory is kept any more, until there is a limit again."""
    if _library.cache_info().currsize and (library := _library()) is not None:
        library.limit(0)


@functools.cache
def _library() -> ctypes.CDLL | None:
    root = Path(torch.__file__).parent
    options = ["-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-lc10"]
    source = f"// for torch {torch.__version__}\n{SOURCE.read_text(encoding='utf-8')}"
    try:
        library = load(source, cache_root() / FOLDER, options)
    except NotBuilt as error:
        advise("memory", f"Wafers take more memory than planned, up to four times the activations: {error}")
        return None
    library.limit.argtypes = [ctypes.c_size_t]
    library.limit.restype = None
    library.install.restype = None
    library.install()
    return library

"""The memory of a wafer's large tensors, which is kept from step to step within a limit. See large_tensors.cpp.

The library is C++, since torch's allocator is a C++ object. It is compiled where it runs, as generated kernels are,
when a plan first has large activations.
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
# Below this size the overhead of the C library's allocator does not matter.
SMALL_BYTES: Final = 16 << 20
# Added to the plan's bytes, which count the gaps of an average model. Pages given back within a step cost a quarter of
# GPT-2's rate.
MORE_GAPS: Final = 0.075


def limit_large_tensors(nbytes: int) -> None:
    """Limits the memory of large tensors and of the holes kept for them; tensors in use may exceed the limit.

    If the library cannot be built, the job's log says so, and the C library's allocator is used, which takes more.

    Args:
        nbytes: the bytes that the plan needs at once, to which MORE_GAPS is added.
    """
    if nbytes >= SMALL_BYTES:
        library = _library()
        if library is not None:
            library.limit(round(nbytes * (1 + MORE_GAPS)))


def release_large_tensors() -> None:
    """Frees the kept memory, and keeps none until the next limit."""
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

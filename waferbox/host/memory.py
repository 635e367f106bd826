"""The memory of a process: the C library's allocator, collections of garbage, refused memory, and sizes as text."""

import ctypes
import errno
import functools
import gc
import re
from typing import Final

# --- The allocator ----------------------------------------------------------------------------------------------------


# Parameters of mallopt, from malloc.h of glibc.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8

# The largest threshold that glibc accepts. Blocks up to this size come from freed memory rather than from new pages.
_LARGE_BLOCK_BYTES: Final = 32 * 1024 * 1024
_KEPT_BYTES: Final = 256 * 1024 * 1024
_GROWTH_BYTES: Final = 16 * 1024 * 1024


@functools.cache
def keep_large_blocks() -> None:
    """Keeps freed blocks of megabytes for later ones, up to _KEPT_BYTES. No effect without glibc.

    By default each message of the gRPC lane gets new, zeroed pages from the kernel several times on its way, which
    halves the lane's goodput. There is one arena, since one thread allocates a block and another frees it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TOP_PAD, _GROWTH_BYTES)
    mallopt(_M_ARENA_MAX, 1)


@functools.cache
def keep_freed_memory() -> None:
    """Keeps all freed memory, for a process that runs the same step many times. No effect without glibc.

    A tensor in new pages of the kernel costs as much as the arithmetic on it.
    """
    keep_large_blocks()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


# --- Collections of garbage -------------------------------------------------------------------------------------------


# New objects between two collections.
_COLLECTION_THRESHOLD: Final = 50_000


def collect_seldom() -> None:
    """Lets Python collect garbage more seldom, for a process that compiles.

    A compile makes millions of objects that stay until its end: with Python's threshold of 700, collections take a
    quarter of its time. Its peak memory is the same with both.
    """
    gc.set_threshold(_COLLECTION_THRESHOLD)


# --- Refused memory ---------------------------------------------------------------------------------------------------


_TEXTS: Final = ("can't allocate memory", "std::bad_alloc")  # torch raises RuntimeError with either


def is_refused_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch, C++ or mmap says that the system refused memory, or has such a cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _TEXTS):
            return True
        cause = cause.__cause__
    return False


# --- Sizes ------------------------------------------------------------------------------------------------------------


UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """The bytes of a text such as "512m" or "8g", as container engines read it. Raises ValueError, also for zero."""
    match = re.fullmatch(r"([0-9]+)([kmgt]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"a size is a number with k, m, g or t behind it, such as 512m or 8g, not {text!r}")
    return int(match[1]) * UNITS[match[2]]

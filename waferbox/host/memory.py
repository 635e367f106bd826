"""Memory of a process: the settings of the C library's allocator, which exceptions say that memory was refused, sizes
on a command line.
"""

import ctypes
import errno
import functools
import re
from typing import Final

# ----------------------------------------------------------------------------------------------------------------------
# The C library's allocator, set for processes that handle bytes in large blocks that live for a moment


# Of mallopt, in malloc.h of glibc.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8

# The most that glibc takes. Blocks up to this come from memory that the process has, rather than from new pages.
_LARGE_BLOCK_BYTES: Final = 32 * 1024 * 1024
_KEPT_BYTES: Final = 256 * 1024 * 1024
_GROWTH_BYTES: Final = 16 * 1024 * 1024


@functools.cache
def keep_large_blocks() -> None:
    """Keeps freed blocks of megabytes for the next ones, up to _KEPT_BYTES.

    By default each message of the gRPC lane takes its pages from the kernel anew, zeroed, several times on its way:
    that halves the lane's goodput. One arena, for a block is made in one thread and freed in another. Where the C
    library is not glibc nothing happens.
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
    """Keeps all that is freed, of whatever size: for a process that runs the same step again and again.

    A tensor that takes new pages from the kernel costs as much as the arithmetic on it.
    """
    keep_large_blocks()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


# --- Exceptions that say that the system has refused memory: of Python, of torch, of C++ and of mmap ------------------


_TEXTS: Final = ("can't allocate memory", "std::bad_alloc")  # of torch, which raises RuntimeError for both


def is_refused_memory(error: BaseException) -> bool:
    """Whether it is one of them, or was raised because of one."""
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


# --- Sizes of memory on a command line --------------------------------------------------------------------------------


UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """The bytes that a text such as "512m" or "8g" stands for, as container engines read it.

    Raises:
        ValueError: it is not a size, or is none.
    """
    match = re.fullmatch(r"([0-9]+)([kmgt]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"a size is a number with k, m, g or t behind it, such as 512m or 8g, not {text!r}")
    return int(match[1]) * UNITS[match[2]]

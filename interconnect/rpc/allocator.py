"""The C library's allocator, set for processes that handle bytes in large blocks that live for a moment."""

import ctypes
import functools
from typing import Final

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

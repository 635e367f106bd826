"""Exceptions that say that the system has refused memory: of Python, of torch, of C++ and of mmap."""

import errno
from typing import Final

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

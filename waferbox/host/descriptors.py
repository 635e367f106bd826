"""File descriptors in large numbers: the limit of a process, shortages, and waits that take any number."""

import errno
import resource
import select
from collections.abc import Iterable
from typing import Final, Protocol

# Errors of `accept` that pass when the process, or the system, has descriptors and memory again.
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HasFileno(Protocol):
    """A file, a socket, or another object with a descriptor."""

    def fileno(self) -> int: ...


def raise_descriptor_limit() -> None:
    """Raises the limit of open descriptors of this process to the most that is allowed; 1,024 is a common default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def readable(descriptors: Iterable[int | HasFileno], seconds: float | None) -> set[int]:
    """Waits until at least one descriptor can be read or is at its end. select.select takes none above 1,023.

    Args:
        descriptors: numbers, or objects with a descriptor.
        seconds: the longest wait; None for no bound.

    Returns:
        The numbers of the readable descriptors; an empty set after `seconds`.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {number for number, _ in poller.poll(None if seconds is None else seconds * 1000.0)}

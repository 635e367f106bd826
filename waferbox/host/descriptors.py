"""Many descriptors: as many as the system lets a process have, and waits for them, however high their numbers."""

import errno
import resource
import select
from collections.abc import Iterable
from typing import Final, Protocol

# Errors of `accept` that pass when the process, or the system, has descriptors and memory again.
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HasFileno(Protocol):
    """A file, a socket."""

    def fileno(self) -> int: ...


def raise_descriptor_limit() -> None:
    """Lets this process have as many as it may; 1,024 is common where nobody asks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def readable(descriptors: Iterable[int | HasFileno], seconds: float | None) -> set[int]:
    """Waits until at least one of the descriptors can be read, or is at its end; select.select knows none above 1,023.

    Args:
        seconds: at most so long; None for as long as it takes.

    Returns:
        The numbers of those that can be read; none of them after `seconds`.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {number for number, _ in poller.poll(None if seconds is None else seconds * 1000.0)}

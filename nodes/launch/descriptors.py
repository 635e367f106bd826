"""Waiting for descriptors, however many the process has open: select.select knows none above 1,023."""

import select
from collections.abc import Iterable
from typing import Protocol


class HasFileno(Protocol):
    """A file, a socket."""

    def fileno(self) -> int: ...


def readable(descriptors: Iterable[int | HasFileno], seconds: float | None) -> set[int]:
    """Waits until at least one of the descriptors can be read, or is at its end.

    Args:
        seconds: at most so long; None for as long as it takes.

    Returns:
        The numbers of those that can be read; none of them after `seconds`.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {number for number, _ in poller.poll(None if seconds is None else seconds * 1000.0)}

"""The limit of restarts without progress."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

from waferbox import deadlines
from waferbox.host.clock import Clock
from wsc.v1 import node_pb2

MAX_CAUSES: Final = 20  # listed in a message


class RestartLimit:
    """A counter of the restarts since the last progress of the job."""

    def __init__(
        self,
        max_num_restarts: int,
        causes: Sequence[str],
        progress: object,
        on_restart: Callable[[Sequence[str]], None],
        clock: Clock,
    ) -> None:
        """Continues a count.

        Args:
            max_num_restarts: allowed in a row without progress.
            causes: of the restarts so far.
            progress: as in add.
            on_restart: called with the causes of all restarts since the last progress.
            clock: of this host.
        """
        self._on_restart = on_restart
        self._clock = clock
        self._max_num_restarts = max_num_restarts
        self._progress = progress
        self._causes = list(causes)
        self._missed: dict[str, str] = {}  # causes of the last restart, as far as this process has seen it
        self._missed_at = 0.0

    @property
    def causes(self) -> Sequence[str]:
        """The causes of the restarts since the last progress."""
        return self._causes

    def add(self, causes: Mapping[str, str], progress: object) -> None:
        """Counts a restart, or adds to the last one: deaths in quick succession may have one cause, and count once.

        Args:
            causes: messages for the user, by the name of the missing node or link.
            progress: a value that changes whenever the job makes progress.
        """
        if progress != self._progress:
            self._progress = progress
            self._causes.clear()
            self._missed.clear()
        now = self._clock.monotonic()
        is_same = now - self._missed_at <= deadlines.RECOVERY.one_restart and self._missed.keys().isdisjoint(causes)
        if self._missed and is_same:
            self._missed.update(causes)
            self._causes.pop()
        else:
            self._missed, self._missed_at = dict(causes), now
        self._causes.append("; ".join(self._missed.values()))
        self._on_restart(self._causes)

    @property
    def is_reached(self) -> bool:
        return len(self._causes) > self._max_num_restarts

    def failure(self) -> node_pb2.Failure:
        """The failure that ends a job at its limit."""
        count = len(self._causes)
        listed, number = [], 1
        for cause, equal in groupby(self._causes):
            last = number + len(list(equal)) - 1
            listed.append(f"  {number}. {cause}" if last == number else f"  {number}. to {last}. {cause}")
            number = last + 1
        causes = "\n".join(listed[:MAX_CAUSES])
        return node_pb2.Failure(
            kind=node_pb2.Failure.KIND_NODE,
            message=f"the job has lost nodes or links {count} times without progress, and max_num_restarts "
            f"is {self._max_num_restarts}:\n{causes}\nWhen the cause is removed, start the script again from its last "
            "checkpoint",
        )

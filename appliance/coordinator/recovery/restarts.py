"""How often a job goes on after a death."""

import time
from collections.abc import Mapping, Sequence

from waferbox import deadlines
from wsc.v1 import node_pb2

MAX_CAUSES = 20  # that are listed


class RestartLimit:
    """Counts the restarts since the job has got further. Used by one thread."""

    def __init__(self, max_num_restarts: int, causes: Sequence[str], progress: object) -> None:
        """max_num_restarts: without progress, in a row. causes: of those up to now. progress: as in add."""
        self._max_num_restarts = max_num_restarts
        self._progress = progress
        self._causes = list(causes)
        self._missed: dict[str, str] = {}  # in the last of them, since this process has the job
        self._missed_at = 0.0

    @property
    def causes(self) -> Sequence[str]:
        """Of the restarts since the job has got further."""
        return self._causes

    def add(self, causes: Mapping[str, str], progress: object) -> None:
        """Somebody has died. Who is missed just after others belongs to their restart: one thing may have cut them off.

        Args:
            causes: what has happened, for the user, by whom it has happened to.
            progress: something that is another whenever the job has got further.
        """
        if progress != self._progress:
            self._progress = progress
            self._causes.clear()
            self._missed.clear()
        now = time.monotonic()
        is_same = now - self._missed_at <= deadlines.RECOVERY.one_restart and self._missed.keys().isdisjoint(causes)
        if self._missed and is_same:
            self._missed.update(causes)
            self._causes.pop()
        else:
            self._missed, self._missed_at = dict(causes), now
        self._causes.append("; ".join(self._missed.values()))

    @property
    def is_reached(self) -> bool:
        return len(self._causes) > self._max_num_restarts

    def failure(self) -> node_pb2.Failure:
        """Why the job ends, where it is reached."""
        count = len(self._causes)
        listed = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(self._causes[:MAX_CAUSES], 1))
        return node_pb2.Failure(
            kind=node_pb2.Failure.KIND_NODE,
            message=f"the job has lost nodes or links {count} times without having got further, and max_num_restarts "
            f"is {self._max_num_restarts}:\n{listed}",
        )

"""Jobs whose coordinators died with the management service before this one: those that nobody would start again."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.coordinator.record import LEFT_SECONDS, is_held, left_records
from wsc.v1 import management_pb2


class LeftJobs:
    """Found by what their coordinators had kept on this host. For one thread."""

    def __init__(self, cache_root: Path, management: str) -> None:
        """management: our address, which was that of the service before this one."""
        self._cache_root = cache_root
        self._hellos = left_records(cache_root, management)
        self._until = time.monotonic() + LEFT_SECONDS

    def take(self, is_known: Callable[[str], bool]) -> Sequence[management_pb2.CoordinatorHello]:
        """Those that have no coordinator any more, as they would have told of themselves; each once.

        is_known: whether a coordinator has told of a job itself, or it has ended.
        """
        if time.monotonic() > self._until:
            self._hellos.clear()
        for job in [job for job in self._hellos if is_known(job)]:
            del self._hellos[job]
        return [self._hellos.pop(job) for job in list(self._hellos) if not is_held(self._cache_root, job)]

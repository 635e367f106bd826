"""Jobs whose coordinators died with whoever would have started others: a management service, or an ingress as well."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.coordinator.record import LEFT_SECONDS, is_held, left_records
from wsc.v1 import management_pb2


class LeftJobs:
    """Found by what their coordinators had kept on this host. For one thread at a time."""

    def __init__(self, cache_root: Path, management: str, ingress: str = "") -> None:
        """Look for them, once.

        Args:
            cache_root: below which their records lie.
            management: the address of the service that they belonged to.
            ingress: the address of the one that ran the coordinators; empty: whoever did.
        """
        self._cache_root = cache_root
        left = left_records(cache_root, management)
        self._hellos = {job: hello for job, hello in left.items() if hello.ingress == ingress or not ingress}
        self._until = time.monotonic() + LEFT_SECONDS

    def __bool__(self) -> bool:
        """Whether there may be one still."""
        return bool(self._hellos) and time.monotonic() < self._until

    def take(self, is_known: Callable[[str], bool] = lambda job: False) -> Sequence[management_pb2.CoordinatorHello]:
        """Those that have no coordinator any more, as they would have told of themselves; each once.

        is_known: whether a coordinator has told of a job itself, or it has ended.
        """
        if not self:
            self._hellos.clear()
        for job in [job for job in self._hellos if is_known(job)]:
            del self._hellos[job]
        return [self._hellos.pop(job) for job in list(self._hellos) if not is_held(self._cache_root, job)]

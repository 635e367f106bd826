"""Watching a job across restarts of the management service, which the job outlives: the stream is opened anew."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import grpc

from waferbox.commands.connection import Connection, WatchLost
from waferbox.output.console import Status, warn
from wsc.v1 import management_pb2

AWAY_SECONDS: Final = 60.0  # that management may be away
RETURN_SECONDS: Final = 20.0  # that one which is back may not know the job: the coordinator comes in a second or so
RETRY_SECONDS: Final = 0.5

_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_AWAY: Final = _BROKEN | {grpc.StatusCode.DEADLINE_EXCEEDED}

T = TypeVar("T")


class JobWatch:
    """Watches one job. responses() is for one thread; job() and close() are for any."""

    def __init__(self, cluster: Connection, job: management_pb2.JobInfo) -> None:
        self._cluster = cluster
        self._job = job
        self._lock = threading.Lock()
        self._stream: grpc.RpcContext | None = None
        self._over = threading.Event()
        self._settled_at = 0.0  # when all of the job should be back

    def responses(self, call: "Callable[[], grpc.CallIterator[T]]") -> Iterator[T]:
        """Those of a call, which is made anew when management was away. Ends with the call, or after close.

        Says on standard error that management is away, and that it is back. Raises WatchLost if it does not come back,
        or comes back without the job, and grpc.RpcError for what else goes wrong.
        """
        while True:
            stream = call()
            with self._lock:
                self._stream = stream
                if self._over.is_set():
                    stream.cancel()  # type: ignore[no-untyped-call]
            try:
                yield from stream
                return
            except grpc.RpcError as error:
                if self._over.is_set():
                    return
                code = _code(error)
                if code == grpc.StatusCode.FAILED_PRECONDITION and time.monotonic() < self._settled_at:
                    self._over.wait(RETRY_SECONDS)
                elif code in _BROKEN:
                    self._wait_for_return()
                else:
                    raise

    def job(self) -> management_pb2.JobInfo:
        """The job as it is now; as it was last, while management is away."""
        try:
            self._job = self._cluster.job(self._job.job)
        except grpc.RpcError as error:
            if _code(error) not in _AWAY | {grpc.StatusCode.NOT_FOUND}:
                raise
        return self._job

    def close(self) -> None:
        """Have responses() end."""
        with self._lock:
            self._over.set()
            if self._stream is not None:
                self._stream.cancel()  # type: ignore[no-untyped-call]

    def _wait_for_return(self) -> None:
        """Until management answers again, and knows the job. Raises WatchLost."""
        named = f"the management service at {self._cluster.address}"
        warn(f"{named} is away; waiting for it, {AWAY_SECONDS:g} s at most")
        began, back = time.monotonic(), None
        while not self._over.wait(RETRY_SECONDS):
            now = time.monotonic()
            try:
                self._job = self._cluster.job(self._job.job)
            except grpc.RpcError as error:
                code = _code(error)
                if code in _AWAY:
                    back = None
                    if now - began > AWAY_SECONDS:
                        raise WatchLost(f"{named} did not come back within {AWAY_SECONDS:g} s", Status.AWAY) from error
                elif code == grpc.StatusCode.NOT_FOUND:
                    back = back or now
                    if now - back > RETURN_SECONDS:
                        raise WatchLost(
                            f"{named} is back, but does not know {self._job.job}: the job ended meanwhile, or its "
                            "coordinator ended with the service",
                            Status.NO_JOB,
                        ) from error
                else:
                    raise
            else:
                self._settled_at = now + RETURN_SECONDS
                warn(f"it is back, after {now - began:.0f} s")
                return


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()

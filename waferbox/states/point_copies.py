"""Copies of point shares on other hosts, and their transfer: a host may be lost with its disk."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc

from waferbox import deadlines, settings
from waferbox.host.folders import why_not_kept
from waferbox.host.threads import CancellationToken, GuardedThread
from waferbox.rpc.server import make_channel
from waferbox.runtime.logs import advise
from waferbox.security.tokens import Kind, cluster_secret
from waferbox.states.point_file import DamagedPoint, PartialFile, PointFile, copy_point
from waferbox.states.point_folders import copy_folder, find_point, make_member_folder, remove_copies
from wsc.v1 import node_pb2, node_pb2_grpc

# --- The transfer of a file -------------------------------------------------------------------------------------------

PART_BYTES: Final = 1 << 20


class NotFetched(RuntimeError):
    """Raised when the other member has no such file, or the transfer fails."""


class NotThere(NotFetched):
    """Raised when the other member has answered that it has no such file."""


def parts_of(path: Path) -> Iterator[node_pb2.RecoveryPointPart]:
    """Yields the bytes of a file, from its start. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        while content := file.read(PART_BYTES):
            yield node_pb2.RecoveryPointPart(nbytes=nbytes, content=content)


def fetch(
    address: str,
    token: str,
    request: node_pb2.ReadRecoveryPointRequest,
    path: Path,
    *,
    rooms: int,
    stays_in_memory: bool,
    cancellation: CancellationToken,
    timeout: float | None,
) -> PartialFile:
    """Fetches a file from the member at an address, and checks it; the caller completes or discards it.

    Args:
        address: the host:port of the member.
        token: the token of this member.
        request: names the file.
        path: the path that the file gets when it is completed.
        rooms: the number of such files that the disk must have room for.
        stays_in_memory: as for PartialFile.
        cancellation: ends the transfer.
        timeout: seconds for the transfer; None: no limit.

    Raises:
        NotThere: the member has no such file.
        NotFetched: the member has died or is too slow, or the transfer was cancelled.
        DamagedPoint: the file is not the recovery point of the request.
        OSError: the file cannot be written.
    """
    file: PartialFile | None = None
    done = nbytes = 0
    try:
        with make_channel(address, token) as channel:
            call = node_pb2_grpc.StateServiceStub(channel).ReadRecoveryPoint(request, timeout)
            with cancellation.on_cancel(lambda: _cancel(call)):
                for part in call:
                    if file is None:
                        nbytes = part.nbytes
                        file = PartialFile(path, rooms * nbytes, stays_in_memory=stays_in_memory)
                    if done + len(part.content) > nbytes:
                        break
                    file.write(part.content, done)
                    done += len(part.content)
        if file is None or done != nbytes:
            raise DamagedPoint(f"{path} did not come whole from {address}")
        point = PointFile(file.partial, owner_name(request.job, request.member))
        try:
            point.check()
        finally:
            point.close()
    except BaseException as error:
        if file is not None:
            file.discard()
        if isinstance(error, grpc.RpcError):
            code, reason = (error.code(), error.details()) if isinstance(error, grpc.Call) else (None, str(error))
            kind = NotThere if code is grpc.StatusCode.NOT_FOUND else NotFetched
            raise kind(f"{address} does not give {path.name} of {request.member}: {reason}") from error
        raise
    return file


def owner_name(job: str, member: str) -> str:
    """Returns the owner that the file of a point names."""
    return f"{member} of {job}"


def _cancel(call: grpc.Call) -> None:
    call.cancel()  # type: ignore[no-untyped-call]


# --- The copies of a job ----------------------------------------------------------------------------------------------

# Room for as much again stays free, for the member's own points.
COPY_ROOMS: Final = 2
SLOWEST_BYTES_PER_SECOND: Final = 10e6

logger = logging.getLogger(__name__)


class PointCopies:
    """The copies that one member of a job has of the points of others, and the way to copies of its own.

    Commands come from one thread; another one makes the copies.
    """

    def __init__(
        self,
        root: Callable[[], Path],
        job: str,
        member: str,
        announce: Callable[[node_pb2.RecoveryPointCopied], None],
        on_defect: Callable[[Exception], None],
        *,
        stays_in_memory: bool,
    ) -> None:
        """
        Args:
            root: returns the folder with the recovery points of all jobs.
            job: the name of the job.
            member: the name of this member.
            announce: reports a copy, or that there is none, to the coordinator.
            on_defect: called with the exception that has ended the thread.
            stays_in_memory: as for PartialFile.
        """
        self._root = root
        self._job = job
        self._member = member
        self._announce = announce
        self._on_defect = on_defect
        self._stays_in_memory = stays_in_memory
        self._sources: Sequence[str] = ()
        self._cancellation = CancellationToken()
        self._lock = threading.Lock()
        self._dropped = 0  # copies with smaller numbers are dropped
        self._closed = False
        self._copying = (0, CancellationToken())  # the number of the point that is being copied
        self._advised = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: GuardedThread | None = None

    def find(self, member: str, number: int) -> Path:
        """Returns the file of a point, or of a copy. Raises FileNotFoundError; ValueError: an odd name."""
        return find_point(self._root(), self._job, member, number)

    # --- Points of this member ----------------------------------------------------------------------------------------

    def expect_loss(self, sources: Sequence[str], cancellation: CancellationToken) -> None:
        """Sets the addresses of members that may have copies of points which the next load does not find here."""
        self._sources, self._cancellation = sources, cancellation

    def fetch(self, path: Path) -> bool:
        """Fetches a point of this member from a holder of a copy.

        Returns:
            Whether there is one.

        Raises:
            NotFetched: no other member gives one, and one that has not answered may have it.
            OSError: the file cannot be written.
        """
        begin = time.monotonic()
        unanswered: NotFetched | None = None
        make_member_folder(path.parent)
        for address in self._sources:
            try:
                # No timeout: the Load that needs the point has a deadline.
                file = self._fetch(address, self._member, path, 1, None, self._cancellation)
            except (NotThere, DamagedPoint) as error:
                _log(error)
                continue
            except NotFetched as error:
                _log(error)
                unanswered = error
                continue
            file.complete()
            logger.info("recovery point %s came from %s, in %.2f s", path.name, address, time.monotonic() - begin)
            return True
        if unanswered is not None:
            raise unanswered
        return False

    # --- Points of others ---------------------------------------------------------------------------------------------

    def copy(self, request: node_pb2.CopyRecoveryPoint) -> None:
        """Begins to make a copy, and later announces it, or that there is none."""
        if self._thread is None:
            self._thread = GuardedThread(self._run, name="recovery-copies", on_defect=self._on_defect)
            self._thread.start()
        self._work.put(lambda: self._copy(request))

    def drop(self, before: int) -> None:
        """Removes the copies with smaller numbers, including those of an earlier process."""
        folder = self._root() / self._job
        with self._lock:
            self._dropped = max(self._dropped, before)
            number, cancellation = self._copying
            if number < before:
                cancellation.cancel()
        if self._thread is None:
            remove_copies(folder, before)
        else:
            self._work.put(lambda: remove_copies(folder, before))

    def close(self) -> None:
        """Gives up an incomplete copy, and ends the thread. The files stay."""
        with self._lock:
            self._closed = True
            self._copying[1].cancel()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    # --- In the thread that copies ------------------------------------------------------------------------------------

    def _run(self) -> None:
        for work in iter(self._work.get, None):
            work()

    def _copy(self, request: node_pb2.CopyRecoveryPoint) -> None:
        begin, number, cancellation = time.monotonic(), request.recovery_point, CancellationToken()
        copied = node_pb2.RecoveryPointCopied(recovery_point=number, member=request.member, given_up=True)
        with self._lock:
            is_wanted = not self._closed and number >= self._dropped
            self._copying = number, cancellation
        path = copy_folder(self._root(), self._job, request.member) / str(number)
        try:
            if is_wanted:
                self._make(request, path, cancellation)
                copied.nbytes, copied.given_up = path.stat().st_size, False
        except FileNotFoundError:
            pass  # Another member with this folder has dropped it.
        except OSError as error:
            self._advise(request, path, error)
        except (NotFetched, DamagedPoint) as error:
            _log(error)
        copied.seconds = time.monotonic() - begin
        self._announce(copied)

    def _make(self, request: node_pb2.CopyRecoveryPoint, path: Path, cancellation: CancellationToken) -> None:
        make_member_folder(path.parent)
        if path.exists():
            return
        if request.same_as and (path.parent / str(request.same_as)).exists():
            copy_point(path.parent, request.same_as, request.recovery_point)
            return
        timeout = deadlines.RECOVERY.copy + request.nbytes / SLOWEST_BYTES_PER_SECOND
        self._fetch(request.address, request.member, path, COPY_ROOMS, timeout, cancellation).complete()

    def _fetch(
        self, address: str, member: str, path: Path, rooms: int, timeout: float | None, cancellation: CancellationToken
    ) -> PartialFile:
        request = node_pb2.ReadRecoveryPointRequest(job=self._job, member=member, recovery_point=int(path.name))
        return fetch(
            address,
            cluster_secret().token(Kind.MEMBER, self._job, self._member),
            request,
            path,
            rooms=rooms,
            stays_in_memory=self._stays_in_memory,
            cancellation=cancellation,
            timeout=timeout,
        )

    def _advise(self, request: node_pb2.CopyRecoveryPoint, path: Path, error: OSError) -> None:
        was_advised, self._advised = self._advised, True
        if not was_advised:
            why = why_not_kept(path.parent, COPY_ROOMS * request.nbytes, error.strerror, settings.RECOVERY_DIR.name)
            lost = f"If the host of {request.member} is lost with its disk, the job may end"
            advise("recovery-copy", f"{lost}: no copy of its recovery point in {why}")


def _log(error: Exception) -> None:
    """Logs damage as a warning, and the absence of a file or a member as information."""
    logger.log(logging.WARNING if isinstance(error, DamagedPoint) else logging.INFO, "%s", error)

"""Copies of recovery points with other members of the job, and their files on the way: a host and its disk may be
lost.
"""

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

# --- The file of a recovery point on its way to another member of the job ---------------------------------------------


PART_BYTES: Final = 1 << 20


class NotFetched(RuntimeError):
    """The other member does not have the file, or does not give it."""


def parts_of(path: Path) -> Iterator[node_pb2.RecoveryPointPart]:
    """The bytes of a file, from its start. Raises OSError."""
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
    """Get a file from the member that listens at an address, and check it; the caller completes or discards it.

    Args:
        token: what is shown there.
        path: the name that the file gets.
        rooms: how many files of its size the disk must have room for.
        stays_in_memory: as of PartialFile.
        timeout: seconds for all of it.

    Raises:
        NotFetched: the member has no such file, is gone or too slow, or it is cancelled.
        DamagedPoint: what came is not the recovery point that was asked for.
        OSError: it cannot be written here.
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
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
            raise NotFetched(f"{address} does not give {path.name} of {request.member}: {reason}") from error
        raise
    return file


def owner_name(job: str, member: str) -> str:
    """JobScope states a file says that it holds."""
    return f"{member} of {job}"


def _cancel(call: grpc.Call) -> None:
    call.cancel()  # type: ignore[no-untyped-call]


# ----------------------------------------------------------------------------------------------------------------------
# Copies of the recovery points of other members, and of this member's with others: a host and its disk may be lost


# As much again stays free, for the member's own points.
COPY_ROOMS: Final = 2
SLOWEST_BYTES_PER_SECOND: Final = 10e6

logger = logging.getLogger(__name__)


class PointCopies:
    """Of one member of one job; a thread makes those of others' files. Commands come from one thread."""

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
        root: finds the folder with those of all jobs. announce: tells the coordinator that a copy is complete.
        on_defect(error): what the thread has ended by. stays_in_memory: as of PartialFile.
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
        self._dropped = 0  # copies with smaller numbers are not wanted
        self._closed = False
        self._copying = (0, CancellationToken())  # the number of what is being copied
        self._advised = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: GuardedThread | None = None

    def find(self, member: str, number: int) -> Path:
        """The file of a point: of this member, or a copy. Raises FileNotFoundError; ValueError for an odd name."""
        return find_point(self._root(), self._job, member, number)

    # -- what this member has lost

    def expect_loss(self, sources: Sequence[str], cancellation: CancellationToken) -> None:
        """What the next load does not find here may lie with those who listen at these addresses."""
        self._sources, self._cancellation = sources, cancellation

    def fetch(self, path: Path) -> bool:
        """Get this member's own file of a point from who has a copy; False if nobody has. Raises OSError."""
        begin = time.monotonic()
        make_member_folder(path.parent)
        for address in self._sources:
            try:
                # The Load that it is for has a deadline.
                file = self._fetch(address, self._member, path, 1, None, self._cancellation)
            except (NotFetched, DamagedPoint) as error:
                _log(error)
                continue
            file.complete()
            logger.info("recovery point %s came from %s, in %.2f s", path.name, address, time.monotonic() - begin)
            return True
        return False

    # -- what others may lose

    def copy(self, request: node_pb2.CopyRecoveryPoint) -> None:
        """Make a copy, and announce it or that there is none."""
        if self._thread is None:
            self._thread = GuardedThread(self._run, name="recovery-copies", on_defect=self._on_defect)
            self._thread.start()
        self._work.put(lambda: self._copy(request))

    def drop(self, before: int) -> None:
        """Remove the copies with smaller numbers; those of a process that was here before, too."""
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
        """Give up what is not complete, and end the thread. The files stay."""
        with self._lock:
            self._closed = True
            self._copying[1].cancel()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    # -- in the thread that copies

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
            pass  # dropped by another member with this folder
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
        told, self._advised = self._advised, True
        if not told:
            why = why_not_kept(path.parent, COPY_ROOMS * request.nbytes, error.strerror, settings.RECOVERY_DIR.name)
            lost = f"If the host of {request.member} is lost with its disk, the job may end"
            advise("recovery-copy", f"{lost}: no copy of its recovery point in {why}")


def _log(error: Exception) -> None:
    """Damage is worth a warning; that somebody has no file, or is gone, is not."""
    logger.log(logging.WARNING if isinstance(error, DamagedPoint) else logging.INFO, "%s", error)

"""The file of a recovery point on its way to another member of the job."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from interconnect.links.cancellation import CancellationToken
from interconnect.rpc.server import make_channel
from memoryx.recovery.partial_file import PartialFile
from memoryx.recovery.point_file import DamagedPoint, PointFile
from wsc.v1 import node_pb2, node_pb2_grpc

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
    """Whose states a file says that it holds."""
    return f"{member} of {job}"


def _cancel(call: grpc.Call) -> None:
    call.cancel()  # type: ignore[no-untyped-call]

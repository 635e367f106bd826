"""The file of one recovery point: complete, or not there."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from waferbox.states.file_pages import PassingFile
from waferbox.states.layout import StateExtent
from wsc.v1 import plan_pb2

# --- Partial files ----------------------------------------------------------------------------------------------------

PARTIAL: Final = ".partial"


def partial_path(path: Path) -> Path:
    """Returns a unique name for a file that is to get this path when it is complete."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


class PartialFile:
    """A file, readable by its user alone, that has another name until it is complete. Used by one thread."""

    def __init__(self, path: Path, room_bytes: int, *, stays_in_memory: bool) -> None:
        """
        Args:
            path: the path of the complete file.
            room_bytes: the free space that the disk must have.
            stays_in_memory: whether the kernel may keep written pages in memory, as it does with any file.

        Raises:
            OSError: the folder cannot be written, or its disk has no room (ENOSPC).
        """
        self.path = path
        self.partial = partial_path(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.partial, flags, 0o600)
        self._pages = None if stays_in_memory else PassingFile(self._descriptor)
        try:
            disk = os.fstatvfs(self._descriptor)
            if disk.f_bavail * disk.f_frsize < room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.discard()
            raise

    def write(self, content: memoryview | bytes, offset: int) -> None:
        done, view = 0, memoryview(content)
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], offset + done)
        if self._pages is not None:
            self._pages.written(offset, len(view))

    def complete(self) -> None:
        """Gives the file its name."""
        os.replace(self.partial, self.path)
        self._close()

    def discard(self) -> None:
        """Removes the file unless it is complete."""
        if self._descriptor >= 0:
            self._close()
            with contextlib.suppress(OSError):
                self.partial.unlink()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


# --- Recovery points --------------------------------------------------------------------------------------------------
#
# A file begins with MAGIC; the states follow, end to end; then a manifest with the name, type, offset and checksum of
# each; then _END. So every byte is checked. A file must survive its process, not its host: nothing waits until the file
# is on the disk.

MAGIC: Final = b"WAFERPT1"
READ_BYTES: Final = 4 << 20  # read and checked at a time
_END: Final = struct.Struct("<QQQ")  # the manifest's offset, its bytes, and the checksum of both and of the manifest
_ROOM: Final = 4096  # in the manifest, for a state with a name of usual length


class DamagedPoint(ValueError):
    """Raised for a file that is not the recovery point that it should be; the message names the file."""


class PointWriter:
    """The file of a point in the making. Used by one thread."""

    def __init__(
        self, folder: Path, number: int, extents: Mapping[str, StateExtent], owner: str, *, stays_in_memory: bool
    ) -> None:
        """
        Args:
            folder: the folder of the member's points.
            number: the number of the point.
            extents: the states; their offsets are not used.
            owner: the owner that the file names.
            stays_in_memory: as for PartialFile.

        Raises:
            OSError: the folder cannot be written, or its disk has no room (ENOSPC).
        """
        self.path = folder / str(number)
        self.nbytes = sum(extent.nbytes for extent in extents.values())
        self._owner = owner
        self._extents: dict[str, StateExtent] = {}
        end = len(MAGIC)
        for name, extent in extents.items():
            self._extents[name] = extent.moved_to(end)
            end += extent.nbytes
        self._end = end
        self._checksums = {name: xxhash.xxh3_64() for name in extents}
        self._file = PartialFile(self.path, end + _ROOM * len(extents), stays_in_memory=stays_in_memory)
        try:
            self._file.write(MAGIC, 0)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, offset: int, content: memoryview) -> None:
        """Writes the next bytes of a state, which begin at the offset. Those before have been written."""
        self._checksums[name].update(content)
        self._file.write(content, self._extents[name].offset + offset)

    def complete(self) -> None:
        """Writes the manifest behind the states, and gives the file its name."""
        manifest = json.dumps(
            {
                "owner": self._owner,
                "states": [
                    [name, extent.element_type, extent.shape, extent.offset, self._checksums[name].intdigest()]
                    for name, extent in self._extents.items()
                ],
            }
        ).encode()
        self._file.write(manifest + _end(self._end, manifest), self._end)
        self._file.complete()

    def discard(self) -> None:
        """Removes the file unless it is complete."""
        self._file.discard()


class PointFile:
    """The file of a complete point. Everything that is read is checked. Used by one thread."""

    def __init__(self, path: Path, owner: str) -> None:
        """
        Args:
            path: the path of the file.
            owner: the owner that the file must name.

        Raises:
            OSError: there is no such file, or it cannot be read.
            DamagedPoint: the file is not complete, is damaged, or names another owner.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            manifest = self._read_manifest()
            if manifest["owner"] != owner:
                raise DamagedPoint(f"{path} holds states of {manifest['owner']}, not of {owner}")
            self.extents: dict[str, StateExtent] = {}
            self._checksums: dict[str, int] = {}
            for name, element_type, shape, offset, checksum in manifest["states"]:
                self.extents[name] = StateExtent.at(offset, plan_pb2.TensorType(element_type=element_type, shape=shape))
                self._checksums[name] = checksum
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(extent.nbytes for extent in self.extents.values())

    def check(self) -> None:
        """Reads and checks all states. Raises as `read`."""
        buffer = memoryview(bytearray(READ_BYTES))
        for name, extent in self.extents.items():
            checksum = xxhash.xxh3_64()
            for done in range(0, extent.nbytes, READ_BYTES):
                part = buffer[: extent.nbytes - done]
                self._fill(part, extent.offset + done)
                checksum.update(part)
            self._compare(name, checksum)

    def read(self, name: str, target: memoryview) -> None:
        """Reads a state into a target of its size, whose content is undefined if the call fails.

        Raises:
            OSError: the disk fails.
            DamagedPoint: the state is not as it was written.
        """
        extent, checksum = self.extents[name], xxhash.xxh3_64()
        assert len(target) == extent.nbytes
        for done in range(0, extent.nbytes, READ_BYTES):
            part = target[done : done + READ_BYTES]
            self._fill(part, extent.offset + done)
            checksum.update(part)
        self._compare(name, checksum)

    def close(self) -> None:
        os.close(self._descriptor)

    def _read_manifest(self) -> Any:
        size = os.fstat(self._descriptor).st_size
        if size < len(MAGIC) + _END.size or self._bytes(0, len(MAGIC)) != MAGIC:
            raise self._damaged("it is no recovery point, or not a complete one")
        end = self._bytes(size - _END.size, _END.size)
        begin, nbytes, _ = _END.unpack(end)
        if not len(MAGIC) <= begin <= size or begin + nbytes + _END.size != size:
            raise self._damaged("it is not complete")
        content = self._bytes(begin, nbytes)
        if _end(begin, content) != end:
            raise self._damaged("its manifest is not what was written")
        return json.loads(content)

    def _compare(self, name: str, checksum: xxhash.xxh3_64) -> None:
        if checksum.intdigest() != self._checksums[name]:
            raise self._damaged(f"{name} is not what was written")

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        self._fill(memoryview(content), offset)
        return bytes(content)

    def _fill(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], offset + done)
            if not count:
                raise self._damaged("it is not complete")
            done += count

    def _damaged(self, why: str) -> DamagedPoint:
        return DamagedPoint(f"{self.path} is damaged: {why}")


def copy_point(folder: Path, number: int, to: int) -> None:
    """Gives a point another number as well. Raises OSError."""
    source, target = folder / str(number), folder / str(to)
    partial = partial_path(target)
    try:
        try:
            os.link(source, partial)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            shutil.copyfile(source, partial)  # The file system has no hard links.
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def is_point(path: Path) -> bool:
    """Whether a file is a recovery point, complete or not. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _end(begin: int, manifest: bytes) -> bytes:
    """Returns the last bytes of a file, which locate its manifest."""
    checksum = xxhash.xxh3_64(manifest)
    checksum.update(struct.pack("<QQ", begin, len(manifest)))
    return _END.pack(begin, len(manifest), checksum.intdigest())

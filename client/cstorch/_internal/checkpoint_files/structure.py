"""Checks that HDF5 can read the structure of a file: in a damaged file it may loop forever, and cannot be stopped.

The structure of a file is all of it except the bytes of its tensors. A file of Waferbox ends with a checksum of the
structure, after the part that HDF5 reads. Any file without a valid checksum, of the real system or changed since, is
walked first by a separate process (walk.py), which the kernel ends if it loops.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from cstorch._internal.checkpoint_files import walk
from cstorch.errors import CheckpointError

# The limit of CPU time for one object of a file, in seconds; the largest known objects take milliseconds.
_SECONDS_PER_OBJECT: Final = 5.0

# The number of bytes of one read.
_PIECE: Final = 1 << 20

_MAGIC: Final = b"\x8awfbx\r\n\x01"
# The checksum, the number of extents before it, and _MAGIC.
_END: Final = np.dtype([("checksum", "<u8"), ("extents", "<u8"), ("magic", "V8")])
# The position of the bytes of a tensor.
_EXTENT: Final = np.dtype([("offset", "<u8"), ("nbytes", "<u8")])


def append_checksum(descriptor: int, data: Iterable[tuple[int, int]]) -> None:
    """Appends the checksum of the structure to a file that HDF5 has closed.

    Args:
        descriptor: The descriptor of the file, to read and write.
        data: Offset and length of each tensor's bytes, which are not part of the structure.
    """
    size = os.fstat(descriptor).st_size
    extents = np.array(sorted(data), dtype=_EXTENT)
    end = np.array((_checksum(descriptor, extents, size), len(extents), _MAGIC), dtype=_END)
    left = memoryview(extents.tobytes() + end.tobytes())
    while left:
        written = os.pwrite(descriptor, left, size)
        left, size = left[written:], size + written


def check_structure(path: Path) -> None:
    """Checks that HDF5 can read all objects of a file in finite time.

    Raises:
        CheckpointError: HDF5 loops on an object, or raises an error.
    """
    if not _is_as_written(path):
        _walk(path)


def _is_as_written(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _END.itemsize
        if size < 0:
            return False
        end = np.frombuffer(os.pread(file.fileno(), _END.itemsize, size), _END)[0]
        count = int(end["extents"])
        if end["magic"].tobytes() != _MAGIC or count > size // _EXTENT.itemsize:
            return False
        size -= count * _EXTENT.itemsize
        extents = np.frombuffer(os.pread(file.fileno(), count * _EXTENT.itemsize, size), _EXTENT)
        return _checksum(file.fileno(), extents, size) == int(end["checksum"])


def _checksum(descriptor: int, extents: np.ndarray[tuple[int], np.dtype[np.void]], size: int) -> int:
    """Returns the checksum of the sorted extents, and of the first `size` bytes outside of them."""
    checksum = xxhash.xxh3_64(extents.tobytes())
    start = 0
    for offset, nbytes in (*extents.tolist(), (size, 0)):
        for at in range(start, min(offset, size), _PIECE):
            checksum.update(os.pread(descriptor, min(offset - at, _PIECE), at))
        start = offset + nbytes
    return checksum.intdigest()


def _walk(path: Path) -> None:
    command = [sys.executable, "-P", walk.__file__, str(path), str(_SECONDS_PER_OBJECT)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    cause = done.stdout.strip() or (
        f"HDF5 did not finish reading one of its objects in {_SECONDS_PER_OBJECT:g} s of CPU time"
        if done.returncode == -walk.SIGNAL
        else f"HDF5 failed on it with exit status {done.returncode}: {done.stderr[-500:]}"
    )
    raise CheckpointError(f"{path} cannot be read: it is truncated or damaged ({cause})")

"""Whether HDF5 can walk the structure of a file: in a damaged one it may never come to an end, which nobody can stop.

The structure of a file is all of it but the bytes of its tensors. A file of ours ends with a checksum of it, behind
what HDF5 looks at: if that holds, the structure is as it was written. Any other file, of the real system or changed
since, is walked by a process of its own first (walk.py), which the kernel ends if it loops.
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

# CPU time for one object of a file, in seconds; the largest that are known take milliseconds.
_SECONDS_PER_OBJECT: Final = 5.0

# Bytes that are read at once.
_PIECE: Final = 1 << 20

_MAGIC: Final = b"\x8awfbx\r\n\x01"
# The checksum, how many extents come before it, and _MAGIC.
_END: Final = np.dtype([("checksum", "<u8"), ("extents", "<u8"), ("magic", "V8")])
# Where the bytes of a tensor are.
_EXTENT: Final = np.dtype([("offset", "<u8"), ("nbytes", "<u8")])


def append_checksum(descriptor: int, data: Iterable[tuple[int, int]]) -> None:
    """Ends a file that HDF5 is done with.

    Args:
        descriptor: of the file, to read and write.
        data: offset and length of what does not belong to the structure.
    """
    size = os.fstat(descriptor).st_size
    extents = np.array(sorted(data), dtype=_EXTENT)
    end = np.array((_checksum(descriptor, extents, size), len(extents), _MAGIC), dtype=_END)
    left = memoryview(extents.tobytes() + end.tobytes())
    while left:
        written = os.pwrite(descriptor, left, size)
        left, size = left[written:], size + written


def check_structure(path: Path) -> None:
    """Makes sure that HDF5 comes to an end with a file, whatever is asked for.

    Raises:
        CheckpointError: it does not, or meets an error on its way.
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
    """Of the extents, which are in order, and of the first `size` bytes without them."""
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
    said = done.stdout.strip() or (
        f"HDF5 did not come to an end with an object of it in {_SECONDS_PER_OBJECT:g} s of CPU time"
        if done.returncode == -walk.SIGNAL
        else f"HDF5 failed on it with exit status {done.returncode}: {done.stderr[-500:]}"
    )
    raise CheckpointError(f"{path} cannot be read: it is truncated or damaged ({said})")

"""Walks the structure of an H5 file: `python walk.py FILE SECONDS`, for structure.py.

It imports h5py alone, to start fast. No bytes of tensors are read. What HDF5 says of a damaged file is printed.
"""

import contextlib
import signal
import sys
from typing import Final

import h5py

# What the kernel ends a process with whose timer of CPU time has run out.
SIGNAL: Final = signal.SIGPROF


def walk(path: str, seconds: float) -> None:
    """Visits every object of a file with its attributes.

    HDF5 may loop for ever on an object, deaf to what Python would do about it: the process ends with SIGPROF when one
    takes more than `seconds` of CPU time. How busy the machine is does not matter.
    """

    def visit(_: str, found: h5py.Group | h5py.Dataset) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for name in found.attrs:
            # They tell of a type that numpy does not have; HDF5 has read it.
            with contextlib.suppress(TypeError, ValueError):
                found.attrs[name]
        if isinstance(found, h5py.Dataset) and found.chunks is not None:
            found.id.get_num_chunks()

    signal.setitimer(signal.ITIMER_PROF, seconds)
    with h5py.File(path, "r") as file:
        visit("/", file)
        file.visititems(visit)


def main(path: str, seconds: str) -> int:
    """The exit status: 1 if h5py raises anything, which it does of many types for a damaged file."""
    try:
        walk(path, float(seconds))
    except Exception as error:  # noqa: BLE001 - the process ends with it
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

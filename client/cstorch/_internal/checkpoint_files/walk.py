"""Walks the structure of an H5 file: `python walk.py FILE SECONDS`, for structure.py.

It imports h5py alone, to start fast, and reads no bytes of tensors. It prints the error of HDF5 for a damaged file.
"""

import contextlib
import signal
import sys
from typing import Final

import h5py

# The signal by which the kernel ends a process whose timer of CPU time has expired.
SIGNAL: Final = signal.SIGPROF


def walk(path: str, seconds: float) -> None:
    """Visits every object of a file with its attributes.

    HDF5 may loop forever on an object, where Python cannot interrupt it. SIGPROF ends the process if an object takes
    more than `seconds` of CPU time, which does not depend on the load of the machine.
    """

    def visit(_: str, found: h5py.Group | h5py.Dataset) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for name in found.attrs:
            # Raised for a type that numpy lacks, after HDF5 has read the attribute.
            with contextlib.suppress(TypeError, ValueError):
                found.attrs[name]
        if isinstance(found, h5py.Dataset) and found.chunks is not None:
            found.id.get_num_chunks()

    signal.setitimer(signal.ITIMER_PROF, seconds)
    with h5py.File(path, "r") as file:
        visit("/", file)
        file.visititems(visit)


def main(path: str, seconds: str) -> int:
    """Walks a file, and returns the exit status: 1 after any error of h5py, which raises many types."""
    try:
        walk(path, float(seconds))
    except Exception as error:  # noqa: BLE001 - the process ends with it
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

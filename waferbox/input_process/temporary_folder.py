"""The folder for the temporary files of multiprocessing, in which loaders with processes of their own make sockets.

An input_fn's process ends by a signal, and so do a loader's processes: none of them removes the folder. A lock shows
whether any of them lives: each inherits it. Workers, launchers at their end, and the next process of an input_fn remove
folders without one.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "waferbox-input-"


def use_own_folder() -> None:
    """Makes the folder of this process and of the processes that it starts. Raises OSError."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # open until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):  # otherwise it was removed before it was locked
            break
        os.close(lock)
    # What multiprocessing.util.get_temp_dir returns; there is no public way to set it.
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def remove_abandoned_folders() -> None:
    """Removes the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)

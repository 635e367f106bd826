"""The folder for the temporary files of multiprocessing, in which loaders with processes of their own make sockets.

An input_fn's process ends by a signal, and so do a loader's processes: none of them removes the folder. A lock shows
whether any of them lives: each inherits it. Workers, launchers at their end, and the next process of an input_fn remove
folders without one.

torch hands a batch over in shared memory, which has a name with the process's number until it is mapped. A process that
is killed before leaves the batch there. So forked processes enter their numbers in the folder, and what removes the
folder removes their shared memory.
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
_SHARED_MEMORY: Final = Path("/dev/shm")


def use_own_folder() -> None:
    """Makes the folder of this process and of the processes that it starts. Raises OSError."""
    folder = ""
    while not folder:
        folder = _locked_folder()
    # What multiprocessing.util.get_temp_dir returns; there is no public way to set it.
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    _enter_number(Path(folder))
    os.register_at_fork(after_in_child=lambda: _enter_number(Path(folder)))


def _enter_number(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to have no input
        (folder / str(os.getpid())).touch()


def _locked_folder() -> str:
    """Makes a folder, which stays locked until this process ends; empty if it was removed before it was locked."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return ""
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.path.exists(folder):
        return folder
    os.close(lock)
    return ""


def remove_abandoned_folders() -> None:
    """Removes the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for entry in folder.iterdir():
                    # A number in use again is another process's.
                    if entry.name.isdecimal() and not os.path.exists(f"/proc/{entry.name}"):
                        remove_shared_memory(int(entry.name))
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def remove_shared_memory(number: int) -> None:
    """Removes what a process with this number, which has ended, was handing over."""
    for shared in _SHARED_MEMORY.glob(f"torch_{number}_*"):
        shared.unlink(missing_ok=True)

"""A small disk that fills up: a tmpfs in a mount namespace of its own, visible to one command and its children."""

import os
import shutil
import subprocess
from pathlib import Path

COMMAND_SECONDS = 20.0
_MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


class NoMounts(RuntimeError):
    """Raised where no file system can be mounted, with the reason."""


def on_small_disk(folder: Path, nbytes: int) -> list[str]:
    """Returns the words before a command, so that it finds a disk of `nbytes`, in whole pages, at the folder.

    Raises:
        NoMounts: the machine does not allow it.
    """
    if shutil.which("unshare") is None:
        raise NoMounts("mount namespaces need `unshare`")
    folder.mkdir(parents=True, exist_ok=True)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", *user, "--mount", "sh", "-c", _MOUNT, "sh", str(nbytes), str(folder)]
    done = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise NoMounts(f"nothing can be mounted here: {done.stderr.strip()}")
    return words

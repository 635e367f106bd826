"""A small disk that fills up: a tmpfs in a mount namespace of its own, seen by one command and what it starts."""

import os
import shutil
import subprocess
from pathlib import Path

COMMAND_SECONDS = 20.0
_MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


class NoMounts(RuntimeError):
    """Nothing can be mounted here; the message says why."""


def on_small_disk(folder: Path, nbytes: int) -> list[str]:
    """The words to put before a command that is to find a disk of so many bytes, in pages, at the folder.

    Raises:
        NoMounts: the machine does not let us.
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

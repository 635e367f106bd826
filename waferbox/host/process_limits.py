"""The limits of processes, threads and the sizes of files: errors that they cause, and what to do about these."""

import contextlib
import errno
import resource
from pathlib import Path
from typing import Final

_NO_THREAD: Final = "can't start new thread"  # of the RuntimeError that Python raises
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


def thread_shortage(error: BaseException) -> str:
    """Returns what to do if an error says that a thread could not be started; empty: it is another error."""
    return _remedy() if isinstance(error, RuntimeError) and _NO_THREAD in str(error) else ""


def failed_start(error: OSError) -> str:
    """Returns why a process could not be started, and what to do if a limit is the reason."""
    return _remedy() if error.errno == errno.EAGAIN else str(error)


def too_large(nbytes: int) -> OSError:
    """Returns the error of a file, or of shared memory, that the limit of the size of files forbids."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    of_process = "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    return OSError(
        errno.EFBIG,
        f"{nbytes:,} bytes of shared memory are needed, but a file of this process, or a piece of its shared memory, "
        f"may have {of_process} bytes. Raise that, with `ulimit -f unlimited`, and start again",
    )


def _remedy() -> str:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    of_user = "any number of" if most == resource.RLIM_INFINITY else str(most)
    of_group = _pids_max()
    return (
        f"no more threads or processes can be started: the user may have {of_user} (`ulimit -u`), and the container or "
        f"the service {'any number' if of_group is None else of_group} (pids.max of its control group). Raise the "
        "smaller limit, or start fewer processes"
    )


def _pids_max() -> int | None:
    """Returns the smallest limit of the control groups of this process; None: there is none."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            root = _CONTROL_GROUPS / controllers
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # The root has no limit; others say "max".
                        limits.append(int((folder / "pids.max").read_text()))
    return min(limits, default=None)

"""Records of the clusters that `waferbox up` has started on this machine, by which other commands find them.

A record is a file in a folder that only the user can use. It is removed when its cluster ends.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from waferbox import settings
from waferbox.cluster.cluster import ClusterError
from waferbox.host.descriptors import readable

FAILURE = "last_failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A cluster that this user has started on this machine."""

    management: str  # address
    pid: int  # of the process that owns it
    created: float  # creation time of that process, as an id may be used again
    given_up: Sequence[str] = ()  # messages about processes that are not restarted any more
    tls: str = ""  # the folder of its certificates; empty: it uses no TLS

    def runs(self) -> bool:
        """Whether the process that owns the cluster still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(self, seconds: float) -> bool:
        """Waits until the process that owns the cluster has ended; False if it has not ended in time."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return not self.runs() or bool(readable([pidfd], seconds))
        finally:
            os.close(pidfd)


def runtime_folder(*, create: bool = True) -> Path:
    """$XDG_RUNTIME_DIR/waferbox, or a folder in the temporary folder. Raises OSError if another user owns it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "waferbox" if base else Path(tempfile.gettempdir()) / f"waferbox-{os.getuid()}"
    if create:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            raise PermissionError(f"{folder} belongs to another user")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of this user's last cluster, kept until another is started or forget_failure is called."""

    management: str
    cause: str


def last_failure() -> Failure | None:
    try:
        return Failure(**json.loads((runtime_folder(create=False) / FAILURE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget_failure() -> None:
    folder = runtime_folder(create=False)
    (folder / FAILURE).unlink(missing_ok=True)
    _drop_if_empty(folder)


@contextlib.contextmanager
def recorded(management: str, pid: int, log: Path | None = None) -> Iterator[Callable[[str], None]]:
    """Keeps the record of a cluster for the duration of the block.

    Args:
        management: address of the management service.
        pid: id of the process that owns the cluster.
        log: a log file that is removed at the end, with the record.

    Yields:
        A function that adds a message about a process that is not restarted any more.

    A ClusterError that leaves the block is recorded as the cluster's failure.
    """
    folder = runtime_folder()
    path = folder / f"{pid}.json"
    partial = folder / f"{pid}.partial"
    (folder / FAILURE).unlink(missing_ok=True)
    created = psutil.Process(pid).create_time()
    given_up: list[str] = []

    def write() -> None:
        tls = os.environ.get(settings.TLS_DIR.name, "")
        record = {"management": management, "pid": pid, "created": created, "given_up": given_up, "tls": tls}
        partial.write_text(json.dumps(record))
        partial.rename(path)  # at once, so that no reader finds half a record

    def give_up(reason: str) -> None:
        given_up.append(reason)
        write()

    write()
    try:
        yield give_up
    except ClusterError as error:
        (folder / FAILURE).write_text(json.dumps({"management": management, "cause": str(error)}))
        raise
    finally:
        path.unlink(missing_ok=True)
        if log is not None:
            log.unlink(missing_ok=True)
        _drop_if_empty(folder)


def discard_log(log: Path) -> None:
    """Removes the log of a cluster that did not start."""
    log.unlink(missing_ok=True)
    _drop_if_empty(log.parent)


def _drop_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the folder may hold files of another cluster
        folder.rmdir()


def local_clusters() -> list[LocalCluster]:
    """The clusters that run, oldest first. Removes the records of clusters that were killed."""
    found = []
    for path in sorted(runtime_folder(create=False).glob("*.json")):
        try:
            cluster = LocalCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # the record was removed meanwhile, or the file is no record
        if cluster.runs():
            found.append(cluster)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda cluster: cluster.created)


def given_up(management: str) -> Sequence[str]:
    """The messages about processes that are not restarted any more, for the cluster at an address if it is local."""
    return [reason for cluster in local_clusters() if cluster.management == management for reason in cluster.given_up]

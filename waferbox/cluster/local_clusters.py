"""Where `waferbox up` notes the cluster that it started, so that `waferbox status` and `down` find it.

One small file for each cluster, in a folder that only the user can use; it goes when the cluster does.
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
    """A cluster that was started on this machine by this user."""

    management: str
    pid: int  # of the process that owns it
    created: float  # of that process, as psutil has it: a number may be used again
    given_up: Sequence[str] = ()  # why processes that ended are not started again, for the user
    tls: str = ""  # the folder of its certificates; empty: it uses no TLS

    def runs(self) -> bool:
        """Whether that process is still there."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(self, seconds: float) -> bool:
        """Wait until that process has ended; False if it has not in time."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return not self.runs() or bool(readable([pidfd], seconds))
        finally:
            os.close(pidfd)


def runtime_folder(*, create: bool = True) -> Path:
    """$XDG_RUNTIME_DIR/waferbox, or one in the temporary folder. Raises OSError if it is not the user's own."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "waferbox" if base else Path(tempfile.gettempdir()) / f"waferbox-{os.getuid()}"
    if create:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            raise PermissionError(f"{folder} belongs to somebody else")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The last cluster of this user that came to its end unasked, until another is started, or it is forgotten."""

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
    """Note a cluster for as long as the context lasts; its log, if it has one, goes with the note.

    What is given is to be called with each reason why a process of the cluster is not started again. A ClusterError
    that leaves the context is noted as its failure.
    """
    folder = runtime_folder()
    path = folder / f"{pid}.json"
    partial = folder / f"{pid}.partial"
    (folder / FAILURE).unlink(missing_ok=True)
    created = psutil.Process(pid).create_time()
    given_up: list[str] = []

    def write() -> None:
        tls = os.environ.get(settings.TLS_DIR.name, "")
        note = {"management": management, "pid": pid, "created": created, "given_up": given_up, "tls": tls}
        partial.write_text(json.dumps(note))
        partial.rename(path)

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
    """Take away the log of a cluster that did not start."""
    log.unlink(missing_ok=True)
    _drop_if_empty(log.parent)


def _drop_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something of another cluster is in it
        folder.rmdir()


def local_clusters() -> list[LocalCluster]:
    """The clusters that run, oldest first. Notes of clusters that were killed are taken away."""
    found = []
    for path in sorted(runtime_folder(create=False).glob("*.json")):
        try:
            cluster = LocalCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # it went while we looked, or is none of ours
        if cluster.runs():
            found.append(cluster)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda cluster: cluster.created)


def given_up(management: str) -> Sequence[str]:
    """Which processes of the cluster at an address are not started again, and why, if it was started here."""
    return [reason for cluster in local_clusters() if cluster.management == management for reason in cluster.given_up]

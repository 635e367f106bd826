"""Records of the clusters that this user has started on this machine, by which commands and scripts find them.

A record is a file in a folder that only the user can use. It is removed when its cluster ends.
"""

import contextlib
import dataclasses
import enum
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox import settings
from waferbox.host.descriptors import readable
from waferbox.launch.spawn import is_running, process_started

EMBEDDED: Final = "embedded"  # in the place of a cluster's name: a script starts a cluster of its own
FAILURE = "last_failure"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


class ClusterError(RuntimeError):
    """Raised when a cluster does not start, or cannot be kept running."""


class ClusterStopped(ClusterError):
    """Raised when a cluster was asked to stop while it starts."""

    def __init__(self) -> None:
        super().__init__("the cluster was stopped while it started")


class Starter(enum.StrEnum):
    """What has started a cluster."""

    UP = "up"  # `waferbox up`, for all scripts of the user
    RUN = "run"  # `waferbox run`, for its script
    SCRIPT = "script"  # a script, for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A cluster that this user has started on this machine.

    Attributes:
        name: no other running cluster of this user has it.
        starter: what has started it.
        management: the address of its management service.
        page: the URL of its page; empty: it has none.
        wafers: the number of its wafers.
        workers: the number of its input workers.
        pid: of the process that owns it.
        started: start time of that process, as an id may be used again; in ticks since the boot, which no clock moves.
        namespace: of the process ids, as /proc shows it; empty: the record is of a version that did not write it.
        created: when the record was made, in seconds since 1970.
        tls: the folder of its certificates; empty: it uses no TLS.
        secret: the file with its secret; empty: that of the clusters that this process starts.
        log: the file of its log that is removed with the record; empty: there is none.
        given_up: messages about processes that are not restarted any more.
    """

    name: str
    starter: Starter
    management: str
    page: str = ""
    wafers: int = 1
    workers: int = 1
    pid: int
    started: int
    namespace: str = ""
    created: float
    tls: str = ""
    secret: str = ""
    log: str = ""
    given_up: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "starter", Starter(self.starter))  # a record has its text

    def runs(self) -> bool:
        """Whether the process that owns the cluster still runs."""
        return is_running(self.pid, self.started)

    def use_certificates(self) -> None:
        """Makes the channels of this process use the cluster's certificates, if it has some and no others are set."""
        if self.tls:
            os.environ.setdefault(settings.TLS_DIR.name, self.tls)

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
    """$XDG_RUNTIME_DIR/waferbox; a folder in the temporary folder where there is none of this user, as after `su`.

    Raises OSError if another user owns it.
    """
    base, user = os.environ.get("XDG_RUNTIME_DIR", ""), os.getuid()
    is_own = os.path.isdir(base) and os.stat(base).st_uid == user
    folder = Path(base) / "waferbox" if is_own else Path(tempfile.gettempdir()) / f"waferbox-{user}"
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
def recorded(
    starter: Starter,
    name: str,
    management: str,
    page: str = "",
    log: Path | None = None,
    *,
    wafers: int = 1,
    workers: int = 1,
) -> Iterator[Callable[[str], None]]:
    """Keeps the record of a cluster that this process owns for the duration of the block.

    Args:
        starter: what has started the cluster.
        name: the name that is wanted; if another cluster has it, a number is added.
        management: address of the management service.
        page: the URL of its page; empty: it has none.
        log: a log file that is removed at the end, with the record.
        wafers: the number of its wafers.
        workers: the number of its input workers.

    Yields:
        A function that adds a message about a process that is not restarted any more.

    Raises:
        OSError: the record of a cluster of `waferbox up` cannot be written. Other clusters run without.

    A ClusterError that leaves the block is recorded as the failure of a cluster of `waferbox up`.
    """
    record = LocalCluster(
        name=name,
        starter=starter,
        management=management,
        page=page,
        wafers=wafers,
        workers=workers,
        pid=os.getpid(),
        started=process_started(os.getpid()),
        namespace=_namespace(),
        created=time.time(),
        tls=os.environ.get(settings.TLS_DIR.name, ""),
        secret=os.environ.get(settings.SECRET_FILE.name, ""),
        log="" if log is None else str(log),
    )
    try:
        path = _write(record)
        folder = path.parent
        if starter is Starter.UP:
            (folder / FAILURE).unlink(missing_ok=True)
    except OSError as error:
        if starter is Starter.UP:
            raise
        print(f"waferbox: commands do not find this cluster: {error}", file=sys.stderr, flush=True)
        yield lambda reason: None
        return
    given_up: list[str] = []

    def give_up(reason: str) -> None:
        given_up.append(reason)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**json.loads(path.read_text()), "given_up": given_up}))
        partial.rename(path)

    try:
        yield give_up
    except ClusterError as error:
        if starter is Starter.UP:
            (folder / FAILURE).write_text(json.dumps({"management": management, "cause": str(error)}))
        raise
    finally:
        _remove(path, record)


def _write(record: LocalCluster) -> Path:
    """Writes the record of a cluster, with a number after its name if another has that; returns the file."""
    local_clusters()  # removes the records of those that were killed, whose names are free
    names = itertools.chain([record.name], (f"{record.name}-{number}" for number in itertools.count(2)))
    name = next(names)
    while True:
        folder = runtime_folder()
        path, partial = folder / f"{name}.json", folder / f"{record.pid}.partial"
        try:
            partial.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(record, name=name))))
            os.link(partial, path)  # at once, so that no reader finds half a record, and no other has the name
        except FileExistsError:
            name = next(names)
            continue
        except FileNotFoundError:
            continue  # the end of another cluster has removed the folder
        partial.unlink()
        return path


def name_of_script(script: str | Path) -> str:
    """Returns a name for the cluster of a script. script: its path, as in sys.argv[0]."""
    stem = Path(script).stem
    if stem == "ipykernel_launcher":
        return "notebook"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")[:40]  # of `python -c`, "-c" is the path
    return "python" if name in ("", "c") else name


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
    for path, cluster in _records():
        if cluster.runs():
            found.append(cluster)
        else:
            _remove(path, cluster)
    return sorted(found, key=lambda cluster: cluster.created)


def _remove(path: Path, cluster: LocalCluster) -> None:
    """Removes the record of a cluster, with its log."""
    path.unlink(missing_ok=True)
    if cluster.log:
        Path(cluster.log).unlink(missing_ok=True)
    _drop_if_empty(path.parent)


def cluster_at(management: str) -> LocalCluster | None:
    """Returns the cluster of this user on this machine whose management service has an address; None: it has another.

    A record of a cluster that was killed counts as well.
    """
    with contextlib.suppress(OSError):
        return next((cluster for _, cluster in _records() if cluster.management == management), None)
    return None


def _records() -> Iterator[tuple[Path, LocalCluster]]:
    """Yields the records with their files. Raises OSError as runtime_folder.

    Not those of a container that shares the folder: its processes have other ids there, so that they would seem to have
    ended.
    """
    for path in sorted(runtime_folder(create=False).glob("*.json")):
        try:
            cluster = LocalCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # the record was removed meanwhile, or the file is no record
        if cluster.namespace in ("", _namespace()):
            yield path, cluster


def _namespace() -> str:
    """Returns the namespace of this process's id."""
    return os.readlink("/proc/self/ns/pid")


def for_everybody(clusters: Sequence[LocalCluster]) -> list[LocalCluster]:
    """Returns those of `waferbox up`, which serve all scripts of the user."""
    return [cluster for cluster in clusters if cluster.starter is Starter.UP]


def with_name(clusters: Sequence[LocalCluster], name: str) -> list[LocalCluster]:
    """Returns the cluster of this name, if there is one."""
    return [cluster for cluster in clusters if cluster.name == name]


def listed(clusters: Sequence[LocalCluster]) -> str:
    """Returns the names and addresses of clusters, for a message."""
    return ", ".join(f"{cluster.name} at {cluster.management}" for cluster in clusters) or "none runs"


def given_up(management: str) -> Sequence[str]:
    """The messages about processes that are not restarted any more, for the cluster at an address if it is local."""
    return [reason for cluster in local_clusters() if cluster.management == management for reason in cluster.given_up]

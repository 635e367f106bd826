"""The file of finished jobs: an SQLite database in the cache folder, which outlives the cluster.

Management adds a job at its end. Pages read the file, also those of later clusters of the same user. All calls block,
so event loops make them in threads; a connection is open for one call only. Nothing depends on the file: an error is
logged once, and the job, the cluster and the page go on without it.
"""

import contextlib
import logging
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from waferbox.host.folders import make_folder, why_not_kept
from wsc.v1 import management_pb2, observation_pb2

FILE: Final = "finished_jobs.sqlite3"
MAX_JOBS: Final = 500  # the oldest are removed
MAX_BYTES: Final = 64 << 20  # of all jobs together
MAX_INFO_BYTES: Final = 8 << 20
MAX_KIND_BYTES: Final = {"log": 1 << 20, "report": 1 << 20, "scalar": 4 << 20}  # of a job's events, the newest
LOCK_SECONDS: Final = 2.0  # how long a call waits for other processes

_SCHEMA: Final = 1  # PRAGMA user_version
_CREATE: Final = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY,
    ended REAL NOT NULL,
    info BLOB NOT NULL,     -- a serialized JobInfo
    events BLOB NOT NULL    -- a compressed JobEvents
) STRICT
"""

logger = logging.getLogger(__name__)


class FinishedJobs:
    """The finished jobs of this user's clusters, in one file of the cache folder. Thread-safe; all methods block."""

    def __init__(self, cache_root: Path) -> None:
        """The first job makes the file."""
        self._path = cache_root / FILE
        self._is_reported = False
        self._listed: tuple[tuple[int, int], Sequence[management_pb2.JobInfo]] | None = None

    def add(self, job: management_pb2.JobInfo, events: Iterable[observation_pb2.JobEvent]) -> None:
        """Adds a job that has ended, with its events; removes the oldest jobs beyond the limits."""
        info, kept = job.SerializeToString(), zlib.compress(_newest(events).SerializeToString())
        with self._guarded(), self._opened(create=True) as file:
            file.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)", (job.job, job.ended, info, kept))
            sizes = file.execute("SELECT job, length(info) + length(events) FROM jobs ORDER BY ended DESC").fetchall()
            total = 0
            for number, (name, size) in enumerate(sizes):
                total += size
                if number >= MAX_JOBS or total > MAX_BYTES:
                    file.execute("DELETE FROM jobs WHERE job = ?", (name,))

    def jobs(self) -> Sequence[management_pb2.JobInfo]:
        """Returns all jobs, those that ended last first, marked as stored."""
        with self._guarded():
            if (found := self._found()) is None:
                return ()
            version = (found.st_mtime_ns, found.st_size)
            listed = self._listed
            if listed is not None and listed[0] == version:
                return listed[1]
            with self._opened() as file:
                rows = file.execute("SELECT info FROM jobs ORDER BY ended DESC LIMIT ?", (MAX_JOBS,)).fetchall()
            jobs = [job for (info,) in rows if (job := _job(info)) is not None]
            self._listed = (version, jobs)
            return jobs
        return ()

    def events(self, name: str) -> observation_pb2.JobEvents:
        """Returns the events of a job; none if it is not stored."""
        with self._guarded():
            if self._found() is None:
                return observation_pb2.JobEvents()
            with self._opened() as file:
                row = file.execute("SELECT events FROM jobs WHERE job = ?", (name,)).fetchone()
            if row is not None:
                data = zlib.decompressobj().decompress(row[0], sum(MAX_KIND_BYTES.values()) + (1 << 20))
                return observation_pb2.JobEvents.FromString(data)
        return observation_pb2.JobEvents()

    def _found(self) -> os.stat_result | None:
        """Returns the status of the file; None if there is none, or another process is just adding its first job."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found if found.st_size else None

    @contextlib.contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        """Yields the file, in a transaction. Raises OSError, sqlite3.Error."""
        self._check(create=create)
        with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS, isolation_level=None)) as file:
            file.execute("BEGIN IMMEDIATE" if create else "BEGIN")
            (schema,) = file.execute("PRAGMA user_version").fetchone()
            if not schema and create:  # the file is new
                file.execute(_CREATE)
                file.execute(f"PRAGMA user_version = {_SCHEMA}")
            elif schema != _SCHEMA:
                raise sqlite3.DatabaseError(f"its schema is {schema}, not {_SCHEMA}")
            yield file
            file.execute("COMMIT")  # without it, closing the connection undoes the changes

    def _check(self, *, create: bool) -> None:
        """Checks that the file is this user's alone. Raises OSError. create: whether to make it if there is none."""
        if create:
            make_folder(self._path.parent, 0o700)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._path} is not a file of this user alone")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Logs the first error of the file, and goes on without it."""
        try:
            yield
        except (OSError, sqlite3.Error, DecodeError, zlib.error) as error:
            if not self._is_reported:
                self._is_reported = True
                text = why_not_kept(self._path, 0, str(error))
                logger.warning("Finished jobs are not kept beyond the cluster: %s. A damaged file can be removed", text)


def _newest(events: Iterable[observation_pb2.JobEvent]) -> observation_pb2.JobEvents:
    """The newest events of each kind within the limits, in their order. events: oldest first."""
    room = dict(MAX_KIND_BYTES)
    kept = []
    for event in reversed(list(events)):
        kind = event.WhichOneof("kind")
        if kind is not None and room[kind] > 0:
            room[kind] -= event.ByteSize() + 8
            kept.append(event)
    return observation_pb2.JobEvents(events=reversed(kept))


def _job(info: bytes) -> management_pb2.JobInfo | None:
    """The job; None if the bytes are none of a job that ended."""
    try:
        job = management_pb2.JobInfo.FromString(info[:MAX_INFO_BYTES])
    except DecodeError:
        return None
    job.stored = True
    return job if job.job and job.ended else None

"""The record of a job on disk, from which a coordinator's successor takes over the job.

The folder is `jobs/<job>` below the cache root, readable for this user alone. A file is written whole or not at all.
It must outlive the process, not the host, so no write waits for the disk. The coordinator of a job holds a lock there.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from appliance.coordinator.execution.recovery_points import RecoveryPoint
from waferbox import deadlines, settings
from waferbox.host.folders import check_private, make_folder, recovery_root, why_not_kept, write_whole
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2, record_pb2

RECORDS: Final = "jobs"
RECORD: Final = "record"
LOCK: Final = "lock"
JOB_NAME: Final = re.compile(r"job-[0-9a-f]{8}")
SWEPT_SECONDS: Final = 24 * 3600.0  # a record without a change for so long has no owner

logger = logging.getLogger(__name__)


class RecordLost(RuntimeError):
    """Raised when the record of an earlier incarnation is missing or unreadable."""


class RecordTaken(RuntimeError):
    """Raised when another process has the job."""


class RecordStorage(Protocol):
    """The storage of a job's record, which one process locks. A file is written whole or not at all."""

    def make(self) -> None:
        """Makes the storage, which is empty. An error is raised by the first write."""

    def hold(self) -> None:
        """Locks the storage until close or the end of the process; no effect if there is none. Raises RecordTaken."""

    def touch(self) -> None:
        """Marks the job as alive, if the storage is locked."""

    def close(self) -> None:
        """Unlocks the storage."""

    def read(self, name: str) -> bytes:
        """Reads a file. Raises OSError."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file. Raises OSError."""

    def remove(self, name: str) -> None:
        """Removes a file, if it is there and can be removed."""

    def remove_all(self) -> None:
        """Removes all files."""

    def why_not_kept(self, nbytes: int, reason: str | None) -> str:
        """Describes for the user why so many bytes could not be written."""


class RecordFolder:
    """The RecordStorage that is a folder, readable for this user alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: int | None = None  # descriptor of the locked file

    def make(self) -> None:
        with contextlib.suppress(OSError):  # the first write reports it
            make_folder(self._folder.parent)
            self._folder.mkdir(mode=0o700, exist_ok=True)

    def hold(self) -> None:
        try:
            held = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return  # without a folder there is no record
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            raise RecordTaken(f"another process holds {self._folder}") from error
        self._held = held

    def touch(self) -> None:
        if self._held is not None:
            os.utime(self._held)

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def read(self, name: str) -> bytes:
        check_private(self._folder)
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        check_private(self._folder)
        write_whole(self._folder / name, content, durable=False)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):  # what is left there is removed with the folder
            (self._folder / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def why_not_kept(self, nbytes: int, reason: str | None) -> str:
        return why_not_kept(self._folder, nbytes, reason)


class JobRecord:
    """The record of a job, as its coordinator writes and reads it. Used in one event loop.

    The first write that fails is logged; from then on the job ends with its coordinator.
    """

    def __init__(self, storage: RecordStorage) -> None:
        self._storage = storage
        self._is_kept = False
        self._record = record_pb2.JobRecord()
        self.plans: dict[str, plan_pb2.Plan] = {}  # of the earlier incarnation, by artifact
        self.steps: dict[str, coordinator_pb2.CompileRequest] = {}  # of the earlier incarnation
        self.inputs: list[node_pb2.PrepareInput] = []  # of the earlier incarnation
        self.was_cut_off = False  # whether the earlier coordinator lost the connection to its script

    # --- read by a successor ------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Locks the job for this process, until close or the end of the process. Raises RecordTaken."""
        self._storage.hold()

    def touch(self) -> None:
        """Marks the job as alive; to be called every few seconds."""
        self._storage.touch()

    def close(self) -> None:
        """Unlocks the job for another process."""
        self._storage.close()

    def take_over(self) -> None:
        """Reads the record of an earlier incarnation, after hold. Raises RecordLost."""
        self._is_kept = True
        read = self._storage.read
        try:
            self._record.ParseFromString(read(RECORD))
            for artifact in self.artifacts.values():
                self.plans[artifact] = plan_pb2.Plan.FromString(read(_plan_file(artifact)))
                self.steps[artifact] = coordinator_pb2.CompileRequest.FromString(read(_step_file(artifact)))
            for loader in self._record.loaders:
                self.inputs.append(node_pb2.PrepareInput.FromString(read(_input_file(loader))))
        except (OSError, DecodeError) as error:
            self._is_kept = False
            raise RecordLost(f"its record cannot be read: {error}") from error

        self.was_cut_off = self._record.cut_off

        def change(record: record_pb2.JobRecord) -> None:
            record.incarnation += 1
            record.cut_off = False

        self._change(change)

    def cause_of_incarnation(self, job: str) -> str:
        """The reason of this take-over, for the user."""
        cut_off = f"the connection between the script and the coordinator of {job} broke"
        cause = cut_off if self.was_cut_off else f"the coordinator of {job} died"
        return f"{cause}, and another has taken over the job"

    @property
    def session_seconds(self) -> float:
        """Seconds within which the script must open a session."""
        if self.was_cut_off:
            return deadlines.COORDINATION.session_return
        return settings.REPLACEMENT_SECONDS.get() if self.incarnation else deadlines.JOB_CREATION.session

    @property
    def hello(self) -> management_pb2.CoordinatorHello:
        """The latest hello for a restarted management service, without the token."""
        hello = management_pb2.CoordinatorHello()
        hello.CopyFrom(self._record.hello)
        return hello

    @property
    def incarnation(self) -> int:
        """Number of coordinators that the job had before."""
        return self._record.incarnation

    @property
    def last_epoch(self) -> int:
        return self._record.last_epoch

    @property
    def causes(self) -> Sequence[str]:
        """The causes of the restarts since the last progress."""
        return list(self._record.causes)

    @property
    def execution(self) -> record_pb2.RecordedExecution | None:
        """The latest execution."""
        if not self._record.HasField("execution"):
            return None
        execution = record_pb2.RecordedExecution()
        execution.CopyFrom(self._record.execution)
        return execution

    @property
    def point(self) -> RecoveryPoint | None:
        """The last complete recovery point."""
        if not self._record.HasField("point"):
            return None
        point = self._record.point
        return RecoveryPoint(
            number=point.number,
            execution=point.execution,
            step=point.step,
            input_states=list(point.input_states),
            hosts={share.keeper: list(share.hosts) for share in point.shares},
        )

    @property
    def artifacts(self) -> Mapping[bytes, str]:
        """The artifacts by the hash of the request."""
        return {recorded.asked: recorded.artifact for recorded in self._record.artifacts}

    @property
    def placed(self) -> Mapping[str, int]:
        """The shard of each placed state."""
        return self._record.placed

    @property
    def former(self) -> Sequence[management_pb2.NodeInfo]:
        """The nodes of a preempted job; empty if it is none."""
        return list(self._record.former)

    @property
    def hosts(self) -> Mapping[str, str]:
        """The host of each member when the job first got nodes; empty before."""
        return self._record.hosts

    @property
    def is_script_seen(self) -> bool:
        """Whether a coordinator has found the script's process on this host, so that its number means the same here."""
        return self._record.script_seen

    @property
    def end(self) -> record_pb2.RecordedEnd | None:
        """The end of the job, if the earlier incarnation was ending it."""
        return self._record.end if self._record.HasField("end") else None

    # --- written ------------------------------------------------------------------------------------------------------

    def begin(self, *, is_kept: bool) -> None:
        """Begins the record. is_kept: False if the job ends with its coordinator anyway. Raises RecordTaken."""
        self._is_kept = is_kept
        if is_kept:
            self._storage.make()
            self.hold()
        self._change(lambda record: None)

    def known_as(self, management: str, hello: management_pb2.CoordinatorHello) -> None:
        """Records the hello for a restarted management service at this address."""

        def change(record: record_pb2.JobRecord) -> None:
            record.management = management
            record.hello.CopyFrom(hello)
            record.hello.ClearField("token")  # whoever may use the token can derive it

        self._change(change)

    def preempted(self, former: Sequence[management_pb2.NodeInfo]) -> None:
        """Records the nodes that the job gives back; none: it has nodes again."""

        def change(record: record_pb2.JobRecord) -> None:
            del record.former[:]
            record.former.extend(former)
            for node in record.former:
                node.ClearField("lease")

        self._change(change)

    def got_nodes(self, hosts: Mapping[str, str]) -> None:
        """Records the host of each member, unless the job had nodes before."""
        if not self._record.hosts:
            self._change(lambda record: record.hosts.update(hosts))

    def saw_script(self) -> None:
        """Records that the script's process was found on this host."""

        def change(record: record_pb2.JobRecord) -> None:
            record.script_seen = True

        self._change(change)

    def ending(self, failure: node_pb2.Failure | None, *, succeeded: bool) -> None:
        """Records how the job ends, before its recovery points are removed. failure: None if the client has left."""
        end = record_pb2.RecordedEnd(failure=failure, succeeded=succeeded)
        self._change(lambda record: record.end.CopyFrom(end))

    def began_epoch(self, number: int) -> None:
        def change(record: record_pb2.JobRecord) -> None:
            record.last_epoch = number

        self._change(change)

    def restarted(self, causes: Sequence[str]) -> None:
        """Records the causes of all restarts since the last progress."""

        def change(record: record_pb2.JobRecord) -> None:
            record.causes[:] = causes

        self._change(change)

    def began(self, index: int, begin: coordinator_pb2.Begin) -> record_pb2.RecordedExecution:
        """Records a new execution; inputs that were prepared before its own are dropped."""
        before = self.execution
        execution = record_pb2.RecordedExecution(
            index=index, begin=begin, follows_left=before is not None and before.left
        )
        loaders = list(self._record.loaders)
        old = loaders[: loaders.index(begin.loader)] if begin.loader in loaders else []

        def change(record: record_pb2.JobRecord) -> None:
            record.execution.CopyFrom(execution)
            for loader in old:
                record.loaders.remove(loader)

        self._change(change)
        for loader in old:
            self._storage.remove(_input_file(loader))
        return execution

    def started(self, index: int) -> None:
        """Records that nothing that the client has sent for an execution can be lost."""

        def change(record: record_pb2.JobRecord) -> None:
            record.execution.started |= record.execution.index == index

        self._change(change)

    def ended(self, index: int, *, left: bool) -> None:
        """Records the end of an execution. left: by its client, before its end."""

        def change(record: record_pb2.JobRecord) -> None:
            if record.execution.index == index:
                record.execution.over, record.execution.left = True, left

        self._change(change)

    def completed(self, point: RecoveryPoint) -> None:
        """Records a complete recovery point."""

        def change(record: record_pb2.JobRecord) -> None:
            del record.causes[:]
            record.point.CopyFrom(
                record_pb2.RecordedPoint(
                    number=point.number,
                    execution=point.execution,
                    step=point.step,
                    input_states=point.input_states,
                    shares=[
                        record_pb2.RecordedShare(keeper=keeper, hosts=sorted(hosts))
                        for keeper, hosts in sorted(point.hosts.items())
                    ],
                )
            )

        self._change(change)

    def drop_point(self) -> None:
        """Removes the recovery point: the job cannot resume."""
        self._change(lambda record: record.ClearField("point"))

    async def divided(self, artifact: str, plan: plan_pb2.Plan) -> None:
        """Records a plan for fewer wafers."""
        await self._keep(_plan_file(artifact), plan.SerializeToString)

    async def compiled(
        self,
        artifact: str,
        asked: bytes,
        plan: plan_pb2.Plan,
        step: coordinator_pb2.CompileRequest,
        placed: Mapping[str, int],
    ) -> None:
        """Records a plan, and the shards that it gave to states."""
        await self._keep(_step_file(artifact), step.SerializeToString)
        await self._keep(_plan_file(artifact), plan.SerializeToString)

        def change(record: record_pb2.JobRecord) -> None:
            record.artifacts.add(artifact=artifact, asked=asked)
            record.placed.update(placed)

        self._change(change)

    async def prepared(self, prepared: node_pb2.PrepareInput) -> None:
        """Records an input that will be sent to the workers."""
        await self._keep(_input_file(prepared.loader), prepared.SerializeToString)

        def change(record: record_pb2.JobRecord) -> None:
            if prepared.loader not in record.loaders:
                record.loaders.append(prepared.loader)

        self._change(change)

    def cut_off(self) -> None:
        """Records that the connection to the script broke, so that a successor must take over the job."""

        def change(record: record_pb2.JobRecord) -> None:
            record.cut_off = True

        self._change(change)
        self._is_kept = False

    def remove(self) -> None:
        """Removes the record at the end of the job."""
        if self._is_kept:
            self._is_kept = False
            self._storage.remove_all()
        self.close()

    # --- files --------------------------------------------------------------------------------------------------------

    def _change(self, change: Callable[[record_pb2.JobRecord], object]) -> None:
        """Changes the record, which is small, and writes it."""
        change(self._record)
        if self._is_kept:
            content = self._record.SerializeToString()
            try:
                self._storage.write(RECORD, content)
            except OSError as error:
                self._give_up(len(content), error)

    async def _keep(self, name: str, serialize: Callable[[], bytes]) -> None:
        """Writes another file, which may be large."""

        nbytes = 0

        def write() -> None:
            nonlocal nbytes
            content = serialize()
            nbytes = len(content)
            self._storage.write(name, content)

        if self._is_kept:
            try:
                await asyncio.to_thread(write)
            except OSError as error:
                self._give_up(nbytes, error)

    def _give_up(self, nbytes: int, error: OSError) -> None:
        """Keeps no record any more: an outdated one must not be used."""
        if self._is_kept:
            self._is_kept = False
            self._storage.remove_all()
            why = self._storage.why_not_kept(nbytes, error.strerror)
            logger.warning("the job will end with this process, as its record cannot be kept in %s", why)


def record_folder(cache_root: Path, job: str) -> Path:
    """Folder of a job's record."""
    return cache_root / RECORDS / job


def orphaned_records(cache_root: Path, management: str) -> dict[str, management_pb2.CoordinatorHello]:
    """Returns the hellos of jobs of this management service whose records changed recently, by job."""
    hellos = {}
    newest = time.time() - deadlines.COORDINATION.left
    with contextlib.suppress(OSError):
        for folder in list((cache_root / RECORDS).iterdir()):
            with contextlib.suppress(OSError, DecodeError):
                check_private(folder)
                if (folder / LOCK).lstat().st_mtime >= newest:
                    record = record_pb2.JobRecord.FromString((folder / RECORD).read_bytes())
                    if record.management == management and record.hello.job == folder.name:
                        hellos[folder.name] = record.hello
    return hellos


def is_kept(cache_root: Path, job: str) -> bool:
    """Whether another coordinator could take over the job."""
    return (record_folder(cache_root, job) / RECORD).exists()


def is_held(cache_root: Path, job: str) -> bool:
    """Whether a process holds the lock of this record."""
    try:
        found = os.open(record_folder(cache_root, job) / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(found)
    return False


def sweep_records(cache_root: Path, older_than_seconds: float = SWEPT_SECONDS) -> None:
    """Removes the records of jobs without an owner: those whose folder has not changed for this many seconds."""
    newest = time.time() - older_than_seconds
    with contextlib.suppress(OSError):
        for folder in list((cache_root / RECORDS).iterdir()):
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_mtime < newest:
                shutil.rmtree(folder, ignore_errors=True)


def remove_left(cache_root: Path, job: str) -> None:
    """Removes the record of an ended job, and its recovery points on this host, unless a process has the job."""
    if JOB_NAME.fullmatch(job) and not is_held(cache_root, job):
        shutil.rmtree(record_folder(cache_root, job), ignore_errors=True)
        shutil.rmtree(recovery_root() / job, ignore_errors=True)


def _plan_file(artifact: str) -> str:
    return f"plan-{artifact}"


def _step_file(artifact: str) -> str:
    return f"step-{artifact}"


def _input_file(loader: str) -> str:
    return f"input-{hashlib.sha256(loader.encode()).hexdigest()[:32]}"


# --- Orphaned jobs ----------------------------------------------------------------------------------------------------


class Orphans(Protocol):
    """Jobs whose coordinator died with the process that would have replaced it."""

    def __bool__(self) -> bool:
        """Whether there may still be one."""

    def take(self, known: Collection[str]) -> Sequence[management_pb2.CoordinatorHello]:
        """Returns the hellos of jobs without a coordinator; each once.

        known: jobs whose coordinator has sent its hello, or that have ended.
        """


class OrphanedJobs:
    """Orphans that are found by their records on this host.

    A management service may have died, or an ingress. Used by one thread at a time.
    """

    def __init__(self, cache_root: Path, management: str, ingress: str = "") -> None:
        """Finds the records.

        Args:
            cache_root: the records are below it.
            management: address of the service that the jobs belonged to.
            ingress: address of the ingress that ran the coordinators; empty: any, or none.
        """
        self._cache_root = cache_root
        left = orphaned_records(cache_root, management)
        self._hellos = {job: hello for job, hello in left.items() if hello.ingress == ingress or not ingress}
        self._until = time.monotonic() + deadlines.COORDINATION.left

    def __bool__(self) -> bool:
        return bool(self._hellos) and time.monotonic() < self._until

    def take(self, known: Collection[str]) -> Sequence[management_pb2.CoordinatorHello]:
        if not self:
            self._hellos.clear()
        for job in self._hellos.keys() & known:
            del self._hellos[job]
        return [self._hellos.pop(job) for job in list(self._hellos) if not is_held(self._cache_root, job)]

"""What a job's coordinator keeps on disk while the job lasts: by it another coordinator takes up the job.

The folder is `jobs/<job>` below the cache root, for this user alone. A file is written whole or not at all; it has to
outlive the process, not the host, so nothing waits until it is on the disk.
"""

import contextlib
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from appliance.coordinator.execution.recovery_points import RecoveryPoint
from nodes.folders import check_private, why_not_kept, write_whole
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2, record_pb2

RECORDS: Final = "jobs"
RECORD: Final = "record"
SWEPT_SECONDS: Final = 24 * 3600.0  # after so long without any change a record has no owner

logger = logging.getLogger(__name__)


class RecordLost(RuntimeError):
    """What the coordinator before this one had kept is not there, or cannot be read."""


class JobRecord:
    """Thread-safe. What cannot be written is told in the log, once; then the job ends with its coordinator."""

    def __init__(self, folder: Path, *, is_kept: bool) -> None:
        """is_kept: False where the job ends with its coordinator anyway."""
        self._folder = folder
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._record = record_pb2.JobRecord()
        self.plans: dict[str, plan_pb2.Plan] = {}  # that another coordinator had, by artifact
        self.steps: dict[str, coordinator_pb2.CompileRequest] = {}  # likewise
        self.inputs: list[node_pb2.PrepareInput] = []  # likewise

    # --- what is read by the one that takes up the job ----------------------------------------------------------------

    def take_up(self) -> None:
        """Have what another coordinator had kept, in its place. Raises RecordLost."""
        try:
            check_private(self._folder)
            self._record.ParseFromString((self._folder / RECORD).read_bytes())
            for artifact in self.artifacts.values():
                self.plans[artifact] = plan_pb2.Plan.FromString((self._folder / _plan_file(artifact)).read_bytes())
                step = (self._folder / _step_file(artifact)).read_bytes()
                self.steps[artifact] = coordinator_pb2.CompileRequest.FromString(step)
            for loader in self._record.loaders:
                self.inputs.append(node_pb2.PrepareInput.FromString((self._folder / _input_file(loader)).read_bytes()))
        except (OSError, DecodeError) as error:
            self._is_kept = False
            raise RecordLost(f"what its coordinator had kept in {self._folder} cannot be read: {error}") from error

        def change(record: record_pb2.JobRecord) -> None:
            record.turn += 1

        self._change(change)

    @property
    def turn(self) -> int:
        """How many coordinators the job had before."""
        return self._record.turn

    @property
    def last_epoch(self) -> int:
        return self._record.last_epoch

    @property
    def causes(self) -> Sequence[str]:
        """Of restarts since the job has got further."""
        return list(self._record.causes)

    @property
    def execution(self) -> record_pb2.RecordedExecution | None:
        """The last that was begun."""
        if not self._record.HasField("execution"):
            return None
        execution = record_pb2.RecordedExecution()
        execution.CopyFrom(self._record.execution)
        return execution

    @property
    def point(self) -> RecoveryPoint | None:
        """The last recovery point that was complete."""
        if not self._record.HasField("point"):
            return None
        point = self._record.point
        return RecoveryPoint(
            number=point.number, execution=point.execution, step=point.step, input_states=list(point.input_states)
        )

    @property
    def artifacts(self) -> Mapping[bytes, str]:
        """By the hash of what was asked for."""
        return {recorded.asked: recorded.artifact for recorded in self._record.artifacts}

    @property
    def placed(self) -> Mapping[str, int]:
        """The shard of each state that has a place."""
        return self._record.placed

    # --- what is kept -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A coordinator begins with the job; it counts from 0 which one that is."""
        with contextlib.suppress(OSError):  # it will be told of by the first write
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        self._change(lambda record: None)

    def began_epoch(self, number: int) -> None:
        def change(record: record_pb2.JobRecord) -> None:
            record.last_epoch = number

        self._change(change)

    def restarted(self, causes: Sequence[str]) -> None:
        """causes: of all restarts since the job has got further."""

        def change(record: record_pb2.JobRecord) -> None:
            record.causes[:] = causes

        self._change(change)

    def began(self, index: int, begin: coordinator_pb2.Begin) -> record_pb2.RecordedExecution:
        """An execution was begun."""
        before = self.execution
        execution = record_pb2.RecordedExecution(
            index=index, begin=begin, follows_left=before is not None and before.left
        )
        self._change(lambda record: record.execution.CopyFrom(execution))
        return execution

    def started(self, index: int) -> None:
        """Nothing that the client has sent for an execution can be lost any more."""

        def change(record: record_pb2.JobRecord) -> None:
            record.execution.started |= record.execution.index == index

        self._change(change)

    def ended(self, index: int, *, left: bool) -> None:
        """An execution is over. left: by its client, before its end."""

        def change(record: record_pb2.JobRecord) -> None:
            if record.execution.index == index:
                record.execution.over, record.execution.left = True, left

        self._change(change)

    def completed(self, point: RecoveryPoint) -> None:
        """The job would go on from this point."""

        def change(record: record_pb2.JobRecord) -> None:
            del record.causes[:]
            record.point.CopyFrom(
                record_pb2.RecordedPoint(
                    number=point.number,
                    execution=point.execution,
                    step=point.step,
                    input_states=point.input_states,
                )
            )

        self._change(change)

    def forgot_point(self) -> None:
        """There is none that the job could go on from."""
        self._change(lambda record: record.ClearField("point"))

    def divided(self, artifact: str, plan: plan_pb2.Plan) -> None:
        """A step has a plan for fewer wafers."""
        self._keep(_plan_file(artifact), plan.SerializeToString)

    def compiled(
        self,
        artifact: str,
        asked: bytes,
        plan: plan_pb2.Plan,
        step: coordinator_pb2.CompileRequest,
        placed: Mapping[str, int],
    ) -> None:
        """A step has a plan, which has given places to states."""
        self._keep(_step_file(artifact), step.SerializeToString)
        self._keep(_plan_file(artifact), plan.SerializeToString)

        def change(record: record_pb2.JobRecord) -> None:
            record.artifacts.add(artifact=artifact, asked=asked)
            record.placed.update(placed)

        self._change(change)

    def prepared(self, prepared: node_pb2.PrepareInput) -> None:
        """The workers are given an input."""
        self._keep(_input_file(prepared.loader), prepared.SerializeToString)

        def change(record: record_pb2.JobRecord) -> None:
            if prepared.loader not in record.loaders:
                record.loaders.append(prepared.loader)

        self._change(change)

    def remove(self) -> None:
        """The job has ended."""
        with self._lock:
            if self._is_kept:
                self._is_kept = False
                shutil.rmtree(self._folder, ignore_errors=True)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _change(self, change: Callable[[record_pb2.JobRecord], object]) -> None:
        with self._lock:
            change(self._record)
            self._write(RECORD, self._record.SerializeToString)

    def _keep(self, name: str, content: Callable[[], bytes]) -> None:
        with self._lock:
            self._write(name, content)

    def _write(self, name: str, content: Callable[[], bytes]) -> None:
        if not self._is_kept:
            return
        data = content()
        try:
            check_private(self._folder)
            write_whole(self._folder / name, data, durable=False)
        except OSError as error:
            self._is_kept = False
            shutil.rmtree(self._folder, ignore_errors=True)  # nobody is to go on from what was
            why = why_not_kept(self._folder, len(data), error.strerror)
            logger.warning("the job will end with this process, as its record cannot be kept in %s", why)


def record_folder(cache_root: Path, job: str) -> Path:
    """Where the record of a job lies."""
    return cache_root / RECORDS / job


def sweep_records(cache_root: Path, older_than_seconds: float = SWEPT_SECONDS) -> None:
    """Remove the records of jobs that have no owner any more: in whose folder nothing was changed for so long."""
    newest = time.time() - older_than_seconds
    with contextlib.suppress(OSError):
        for folder in list((cache_root / RECORDS).iterdir()):
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_mtime < newest:
                shutil.rmtree(folder, ignore_errors=True)


def _plan_file(artifact: str) -> str:
    return f"plan-{artifact}"


def _step_file(artifact: str) -> str:
    return f"step-{artifact}"


def _input_file(loader: str) -> str:
    return f"input-{hashlib.sha256(loader.encode()).hexdigest()[:32]}"

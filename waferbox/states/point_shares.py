"""The point shares of a state keeper: when they are made, and the thread that writes them."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from waferbox import settings
from waferbox.host.folders import why_not_kept
from waferbox.host.threads import GuardedThread
from waferbox.links.hub import Stopped
from waferbox.runtime.logs import advise
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.progress import Progress
from waferbox.runtime.schedule import StepSchedule
from waferbox.states.layout import StateRequirements
from waferbox.states.point_copies import NotFetched
from waferbox.states.point_file import DamagedPoint, PointFile, PointWriter, copy_point
from waferbox.states.point_folders import folder_identity, make_member_folder, remove_partial, remove_points
from waferbox.states.point_share import PointShare
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2

# A folder that was not changed for a day is swept, and a job may be idle for longer.
TOUCH_SECONDS: Final = 3600.0

_Work = Callable[[], None]


class PointShares:
    """The point shares of one member of a job.

    The thread of the steps begins them, a thread of their own writes them, and commands come from a third.
    """

    def __init__(
        self,
        store: StateStore,
        folder: Callable[[], Path],
        owner: str,
        announce: Callable[[node_pb2.RecoveryPointKept], None],
        on_defect: Callable[[Exception], None],
        fetch: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        """
        Args:
            store: the states.
            folder: returns the folder of the points; raises ValueError: the member can have none.
            owner: the owner that the files name.
            announce: reports a complete point to the coordinator.
            on_defect: called with the exception that has ended the thread.
            fetch: fetches a point that cannot be read here from another member, and returns whether one has it; may
                raise OSError, and NotFetched if a later attempt may find one.
        """
        self.due_step = 0  # the step of the execution after which a point is made; 0: none
        self._store = store
        self._folder = folder
        self._owner = owner
        self._announce = announce
        self._on_defect = on_defect
        self._fetch = fetch
        self._changed = threading.Condition()
        self._interrupted = False
        self._due = self._first = self._last = 0  # numbers of points
        self._newest: PointShare | None = None  # the share that was begun or restored last
        self._newest_number = 0
        self._advised = False
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: GuardedThread | None = None

    # --- Commands -----------------------------------------------------------------------------------------------------

    def expect(self, start: node_pb2.Start) -> None:
        """Sets the points at the beginning and the end of an execution, before it starts."""
        with self._changed:
            self._first, self._last, self.due_step = start.recovery_point, start.last_recovery_point, 0

    def expect_after(self, step: int, number: int) -> None:
        """Makes a point after a step of the execution, unless the step has passed."""
        with self._changed:
            self.due_step, self._due = step, number

    def drop(self, before: int) -> None:
        """Removes the points with smaller numbers."""
        folder = self._folder()
        with self._changed:
            if self._newest is not None and self._newest_number < before:
                self._newest.end()
                self._newest = None
            self._do(lambda: remove_points(folder, before))

    def load(self, required: StateRequirements, number: int) -> list[str]:
        """Lays out the required states, and restores those of a point if its number is not 0.

        Returns:
            The names of the required states without a value.

        Raises:
            JobFailure: the point cannot be read; of KIND_USER if it cannot be read later either.
        """
        with self._changed:
            self._interrupted, self.due_step = False, 0
            if number and self._newest is not None:
                self._newest.end()
                self._newest = None
        return self._put_back(required, number) if number else self._store.load(required)

    def _put_back(self, required: StateRequirements, number: int) -> list[str]:
        path = self._folder() / str(number)
        try:
            try:
                missing = self._read(required, path)
            except (OSError, DamagedPoint):
                if not self._fetch(path):
                    raise
                missing = self._read(required, path)
        except (FileNotFoundError, DamagedPoint) as error:
            raise JobFailure(
                node_pb2.Failure.KIND_USER,
                f"recovery point {number} cannot be read: {error}. No other shard has a copy of it: start the script "
                "again from its last checkpoint",
            ) from error
        except (OSError, NotFetched) as error:
            raise JobFailure(node_pb2.Failure.KIND_NODE, f"recovery point {number} cannot be read: {error}") from error
        with self._changed:
            self._newest, self._newest_number = self._store.begin_recovery_point(required=True), number
            self._newest.complete = True
            self._newest.end()
        return [name for name in missing if not self._store.is_written(name)]

    def _read(self, required: StateRequirements, path: Path) -> list[str]:
        """Restores the states of a file. Raises OSError, DamagedPoint."""
        file = PointFile(path, self._owner)
        try:
            missing = self._store.load(required, file.extents)
            for name, extent in self._store.extents().items():
                if name in file.extents and extent.is_like(file.extents[name]):
                    with self._store.states.passing((extent.offset, extent.nbytes)):
                        file.read(name, self._store.memory.view(extent.offset, extent.nbytes))
                    self._store.mark_written([name])
        finally:
            file.close()
        return missing

    def loaded_point(self) -> node_pb2.RecoveryPointKept:
        """Returns the report on the restored point: this member has it."""
        with self._changed:
            assert self._newest is not None, "a point has just been restored"
            return _kept(self._folder(), self._newest_number, self._newest.nbytes)

    def interrupt(self) -> None:
        """Makes waits for a point raise Stopped, until `load`."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Gives up an incomplete share, and ends the thread. The files stay."""
        with self._changed:
            if self._newest is not None:
                self._newest.end()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    # --- In the thread of the steps -----------------------------------------------------------------------------------

    def keep_first(self, progress: Progress) -> None:
        """Makes the point before the first step. Raises Stopped: interrupted."""
        self._keep_required(self._first, progress)

    def keep_due(self, step: int) -> None:
        """Makes the point that is due after a step, which has ended."""
        with self._changed:
            if self.due_step != step:
                return  # A command has set another step meanwhile.
            number, self.due_step = self._due, 0
        self._keep(number, required=False)

    def keep_last(self, progress: Progress) -> None:
        """Makes the point after the last step. Raises Stopped: interrupted."""
        self._keep_required(self._last, progress)

    def _keep_required(self, number: int, progress: Progress) -> None:
        if number:
            progress.waits = True  # for the disk, if the point before is not complete
            self._keep(number, required=True)
            progress.waits = False

    def _keep(self, number: int, *, required: bool) -> None:
        begin, folder = time.monotonic(), self._folder()
        with self._changed:
            newest = self._newest
            if newest is not None and newest.unchanged:
                newest.required |= required
                before, self._newest_number = self._newest_number, number
                self._do(lambda: self._link(folder, newest, before, number, begin))
                return
            if newest is not None and not newest.ended:
                if not newest.required:
                    newest.end()
                elif not required:
                    return
                else:
                    self._changed.wait_for(lambda: newest.ended or self._interrupted)
                    if self._interrupted:
                        raise Stopped
            self._newest = point = self._store.begin_recovery_point(required=required)
            self._newest_number = number
            self._do(lambda: self._write(folder, point, number, begin))

    # --- In the thread that writes ------------------------------------------------------------------------------------

    def _do(self, work: _Work) -> None:
        """Gives work to the thread, which does it in order."""
        if self._thread is None:
            self._thread = GuardedThread(self._run, name="recovery-points", on_defect=self._failed)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=TOUCH_SECONDS)
            except queue.Empty:
                with contextlib.suppress(OSError):
                    os.utime(self._folder())
                continue
            if work is None:
                return
            work()
            with self._changed:
                self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        self.interrupt()
        self._on_defect(error)

    def _write(self, folder: Path, point: PointShare, number: int, begin: float) -> None:
        try:
            make_member_folder(folder)
            remove_partial(folder)
            stays = self._store.settings.folder is None
            file = PointWriter(folder, number, point.extents, self._owner, stays_in_memory=stays)
            try:
                point.write_to(file)
            finally:
                file.discard()
        except OSError as error:
            self._failed_to_write(point, folder, number, error)
        finally:
            point.close()
        if point.complete:
            self._announce_kept(folder, number, point, begin)

    def _link(self, folder: Path, point: PointShare, before: int, number: int, begin: float) -> None:
        """Gives the file of a point another number: the states have not changed since."""
        # The file could not be written; only the failure of the number before was reported.
        if not point.complete:
            self._announce(node_pb2.RecoveryPointKept(recovery_point=number, given_up=True))
            return
        try:
            copy_point(folder, before, number)
        except OSError as error:
            self._failed_to_write(point, folder, number, error)
        else:
            self._announce_kept(folder, number, point, begin, same_as=before)

    def _failed_to_write(self, point: PointShare, folder: Path, number: int, error: OSError) -> None:
        """Reports that there will be no such point; the job continues without it."""
        with self._changed:
            if self._newest is point:
                self._newest = None
            was_advised, self._advised = self._advised, True
        self._announce(node_pb2.RecoveryPointKept(recovery_point=number, given_up=True))
        if not was_advised:
            why = why_not_kept(folder, point.nbytes, error.strerror, settings.RECOVERY_DIR.name)
            what = "If a process dies the job starts again from further back, and between two executions it ends"
            advise("recovery", f"{what}: no recovery point in {why}")

    def _announce_kept(self, folder: Path, number: int, point: PointShare, begin: float, same_as: int = 0) -> None:
        kept = _kept(folder, number, point.nbytes)
        kept.same_as, kept.seconds = same_as, time.monotonic() - begin
        self._announce(kept)


def _kept(folder: Path, number: int, nbytes: int) -> node_pb2.RecoveryPointKept:
    kept = node_pb2.RecoveryPointKept(recovery_point=number, nbytes=nbytes)
    with contextlib.suppress(OSError):
        kept.folder = folder_identity(folder.parent.parent)
    return kept


# --- The end of a step ------------------------------------------------------------------------------------------------


def keep_due_states(
    recovery_points: PointShares, snapshots: Snapshots, schedule: StepSchedule, progress: Progress, step: int
) -> None:
    """Makes the recovery point and the snapshot that are due after a step of the epoch. Raises Stopped: interrupted."""
    global_step = schedule.global_step(step)
    if recovery_points.due_step == global_step:
        recovery_points.keep_due(global_step)
    if schedule.keeps_snapshot(step):
        progress.waits = True  # for the client, which may still read the snapshot before
        snapshots.take(global_step)
        progress.waits = False

"""The executions of a job, one after the other, with those that an earlier incarnation began."""

from collections.abc import Sequence
from typing import Protocol

from appliance.coordinator.execution.client_progress import ClientProgress
from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.recovery_points import RecoveryPoint
from appliance.coordinator.record import JobRecord
from wsc.v1 import coordinator_pb2


class MakeExecution(Protocol):
    """Makes an execution by its number in the job; the arguments are those of CoordinatedExecution."""

    def __call__(
        self,
        index: int,
        begin: coordinator_pb2.Begin,
        progress: ClientProgress,
        /,
        *,
        follows_left: bool,
        loses_states: bool,
    ) -> CoordinatedExecution: ...


class ExecutionSlot:
    """The current execution of a job, at most one at a time. Used in one event loop."""

    def __init__(self, make: MakeExecution, record: JobRecord) -> None:
        self._make = make
        self._record = record
        self._current: CoordinatedExecution | None = None
        self._restoring: CoordinatedExecution | None = None  # restores the states of the last execution
        self._last_epoch = record.last_epoch
        last = record.execution
        self._index = last.index if last is not None else 0
        # The earlier incarnation began it and it is not over: the client will continue it.
        self.is_awaited = last is not None and not last.over
        self._restores_states = record.incarnation > 0  # the nodes have discarded their states

    @property
    def current(self) -> CoordinatedExecution | None:
        return self._current

    def live(self) -> Sequence[CoordinatedExecution]:
        """Returns the executions that receive messages of the nodes."""
        return [execution for execution in (self._current, self._restoring) if execution is not None]

    def can_be_restored(self, point: RecoveryPoint | None) -> bool:
        """Whether `restore` would succeed from this point, the last complete one, and no execution is under way."""
        last = self._record.execution
        if self._current is not None or self.is_awaited or last is None:
            return last is None
        if point is None or point.execution != last.index:
            return False
        return point.is_last or (last.left and last.started)

    async def restore(self) -> None:
        """Restores the states of the last execution if none runs. Raises as CoordinatedExecution.restore."""
        last = self._record.execution
        if self._current is not None:
            self._current.restore_initial_states()  # it began during the recovery
        if last is None or self._current is not None:
            return
        execution = self._make(
            last.index, last.begin, ClientProgress(), follows_left=last.follows_left, loses_states=True
        )
        self._restoring = execution
        try:
            await execution.restore(from_any_step=last.left and last.started)
            self._restores_states = False
        finally:
            self._restoring = None

    def begin(self, begin: coordinator_pb2.Begin) -> CoordinatedExecution | None:
        """Begins or resumes an execution; None while there is another."""
        if self._current is not None:
            return None
        last, point = self._record.execution, self._record.point
        progress = ClientProgress.of(begin.resumption)
        if begin.HasField("resumption") and last is not None and last.begin.id == begin.id:
            has_point = point is not None and point.execution == last.index
            progress.is_started |= last.started or has_point
        else:
            self._index += 1
            last = self._record.began(self._index, begin)
        # The nodes' states are undefined during a restore, and after one that failed.
        loses_states = self._restores_states or self._restoring is not None
        self._current = self._make(
            last.index, begin, progress, follows_left=last.follows_left, loses_states=loses_states
        )
        self._restores_states = self.is_awaited = False
        return self._current

    def end(self, execution: CoordinatedExecution) -> bool:
        """Records the end of an execution; False if it was recorded before."""
        if self._current is not execution:
            return False
        self._current = None
        self._record.ended(execution.index, left=execution.is_left)
        return True

    def next_epoch(self) -> int:
        """Returns the number of a new epoch."""
        self._last_epoch += 1
        self._record.began_epoch(self._last_epoch)
        return self._last_epoch

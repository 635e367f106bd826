"""An execution as the coordinator runs it, which is a sequence of epochs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from appliance.coordinator.execution.client_progress import ClientProgress
from appliance.coordinator.execution.epoch import Epoch
from appliance.coordinator.execution.failures import Verdict
from appliance.coordinator.execution.output_links import OutputLinks
from appliance.coordinator.execution.recovery_points import (
    ExecutionPoints,
    NoRecoveryPoint,
    RecoveryPoint,
    RecoveryPoints,
)
from appliance.coordinator.execution.waiting import Waiting
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from waferbox.host.clock import Clock
from waferbox.host.event_loop import Changes
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

PROGRESS_SECONDS = 0.5

_Result = TypeVar("_Result")


class _StopsEarlier(Exception):
    """Raised where results are awaited that the client does not take, as it has left its loop."""


class _InputFailed(Exception):
    """Raised where results are awaited of a step that has no input."""

    def __init__(self, failure: node_pb2.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ExecutionOwner(Protocol):
    """The job of an execution, which an execution asks for plans and numbers, and informs of events."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a node or a link is missing now."""

    def plan(self, artifact: str) -> plan_pb2.Plan:
        """Returns the plan of a compiled step for the present number of wafers."""

    def next_epoch(self) -> int:
        """Returns the number of a new epoch."""

    def epoch_began(self, execution: int, epoch: int) -> None:
        """Called with the numbers of an execution and of its epoch, whose steps will run."""

    def started(self, execution: int) -> None:
        """Called when nothing that the client has sent for an execution can be lost any more."""

    def link_failed(self, failure: node_pb2.Failure) -> None:
        """Called when a link of the coordinator is lost, or has a defect."""

    def input_failed(self, failure: node_pb2.Failure) -> None:
        """Called when the client has the results of all steps before one that has no input."""

    def progressed(self, step: int, num_steps: int) -> None:
        """Called at intervals while outputs are sent, and after the last step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Called with sampled outputs; see Results."""

    def found(self, finding: str) -> None:
        """Called with what the script does otherwise than it says, possibly several times with the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionParts:
    """The parts of a job that its executions use.

    Attributes:
        owner: the job.
        nodes: its members.
        links: on which it receives outputs.
        verdict: the reason why it ends.
        changes: of its state.
        points: its recovery points; None: a death ends the job.
        clock: of this host.
        run_ahead_steps: steps with outputs that may wait for the client.
    """

    owner: ExecutionOwner
    nodes: JobMembers
    links: OutputLinks
    verdict: Verdict
    changes: Changes
    points: RecoveryPoints | None
    clock: Clock
    run_ahead_steps: int


class CoordinatedExecution:
    """An execution as the coordinator runs it: a sequence of epochs. Each output is sent to the client once, in order.

    The driver of the job calls load, wait_for_states, start, wait_for_end, stop, end_epoch, resume and restore, which
    send commands to nodes, one at a time.
    """

    def __init__(
        self,
        parts: ExecutionParts,
        index: int,
        begin: coordinator_pb2.Begin,
        progress: ClientProgress,
        *,
        follows_left: bool,
        loses_states: bool,
    ) -> None:
        """Makes an execution without an epoch; load or resume begins the first.

        Args:
            parts: of the job.
            index: number of the execution in the job, from 1.
            begin: the client's request.
            progress: of the client, if a coordinator of an earlier incarnation began the execution.
            follows_left: whether the client left the previous execution before its end.
            loses_states: whether the nodes may have lost the states of the previous execution.
        """
        self.index = index
        self._parts = parts
        self._owner = parts.owner
        self._nodes = parts.nodes
        self._changes = parts.changes
        self._begin = coordinator_pb2.Begin()
        self._begin.CopyFrom(begin)  # stop_after changes it
        self.num_asked_steps = begin.num_steps
        self._client = progress
        self._schedule = StepSchedule.from_start(self._start_from(0))
        self._points: ExecutionPoints | None = None
        if parts.points is not None:
            self._points = ExecutionPoints(
                parts.points,
                parts.nodes,
                execution=index,
                follows_left=follows_left,
                num_steps=self._schedule.num_steps,
                wants_input_states=begin.wants_input_states,
                is_received=self._is_received,
                clock=parts.clock,
            )
        self._waiting = Waiting(parts.changes, parts.verdict, lambda: parts.owner.is_interrupted)
        self._epoch: Epoch | None = None
        self._is_ending = self.is_abandoned_by_client = False
        self._killed_at = 0  # the last step for which a process of the loader was killed; 0: none
        self._findings: list[str] = []  # what the script does otherwise than it says
        self._has_all = False  # whether all outputs and checkpoints were sent to the client
        self._has_input_failure = False  # whether the client got an error of a step without input, and has not left yet
        self.is_stopped = False  # whether all steps are done, and the nodes have stopped
        self._keeps_nothing = loses_states  # state keepers may have lost the states of the previous execution
        self._wanted: coordinator_pb2.StateWanted | None = None  # of the last attempt to begin
        self._sent: coordinator_pb2.StateSent | None = None  # the client's answer to an attempt

    @property
    def number(self) -> int:
        """The number of the epoch; 0 before the first."""
        return 0 if self._epoch is None else self._epoch.number

    @property
    def is_started(self) -> bool:
        """Whether the steps run and nothing that the client has sent can be lost."""
        return self._client.is_started

    @property
    def shown_step(self) -> int:
        """The last step whose outputs were sent to the client."""
        return self._client.shown_step

    @property
    def consumed_step(self) -> int:
        """The last step whose closures the client is known to have run."""
        return self._client.consumed_step

    @property
    def is_client_behind(self) -> bool:
        """Whether the client has outputs whose closures it has not run, and will, or the error of a step without input.

        It may handle both for as long as it likes, as in a debugger.
        """
        is_consuming = self._client.consumed_step < min(self._client.shown_step, self._begin.num_steps)
        return is_consuming or self._has_input_failure

    @property
    def is_epoch_over(self) -> bool:
        """Whether no epoch runs, so that the end of a link is no failure."""
        return self._epoch is None or self._epoch.over

    # --- the client's call --------------------------------------------------------------------------------------------

    async def responses(self) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        """Yields all messages to the client, in order. Raises JobFailed, Abandoned."""
        async for response in self._attempts():
            yield response
        with contextlib.suppress(_StopsEarlier):
            async for response in self._results_up_to_bad_input(self._schedule):
                yield response
        self._set_has_all()
        yield coordinator_pb2.ExecuteResponse(finished=await self._finished())

    async def _attempts(self) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        """Yields what the client must do so that the steps begin, and that they have. Raises JobFailed, Abandoned."""
        attempt = 0
        while not self._client.is_started:
            wanted = await self._waiting.until(lambda attempt=attempt: self._new_attempt(attempt))  # type: ignore[misc]
            if isinstance(wanted, coordinator_pb2.StateWanted):
                attempt = wanted.attempt
                yield coordinator_pb2.ExecuteResponse(state_wanted=wanted)
        if not self._begin.resumption.started:
            yield coordinator_pb2.ExecuteResponse(started=coordinator_pb2.Started())

    async def _results_up_to_bad_input(self, schedule: StepSchedule) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        """Yields the results of the steps that have input, and then the failure of the one that has none.

        Raises _StopsEarlier if the client has left its loop, as it does after such a failure, JobFailed, Abandoned.
        """
        try:
            async for response in self._results(schedule):
                yield response
            self._set_has_all()
            await self._until(self._has_stopped, schedule, schedule.num_steps)
        except _InputFailed as error:
            last = error.failure.step - 1
            if self._points is None:  # without which no step can be undone
                await self._waiting.until(lambda: self._is_received(last))
                raise self._parts.verdict.fail(error.failure) from error
            self._owner.progressed(last, schedule.num_steps)
            self._owner.input_failed(error.failure)
            self._has_input_failure = True
            yield coordinator_pb2.ExecuteResponse(input_failed=error.failure)
            await self._until(lambda: False, schedule)

    async def _finished(self) -> coordinator_pb2.ExecutionFinished:
        """Waits until all nodes have stopped; returns the end of the execution. Raises JobFailed, Abandoned."""

        def is_over() -> bool:
            failure = self._input_failure(self._schedule.num_steps)
            if failure is not None and not self.is_stopped:
                raise self._parts.verdict.fail(failure)
            return self._has_stopped()

        await self._waiting.until(is_over)
        epoch = self._current()
        # A worker sends the state of its loader after the last step before it sends Finished.
        states = epoch.input_states(self._schedule.num_steps) if self._begin.wants_input_states else ()
        return coordinator_pb2.ExecutionFinished(seconds=epoch.seconds, input_states=states, findings=self._findings)

    def _set_has_all(self) -> None:
        self._has_all = True
        self._changes.notify()

    def _has_stopped(self) -> bool:
        self._take_outputs()  # of steps that run again
        return self.is_stopped

    async def _until(self, ready: Callable[[], _Result], schedule: StepSchedule, step: int = 0) -> _Result:
        """Waits for a result of a step; 0: of none.

        Raises _StopsEarlier if the client has left its loop, _InputFailed if the step, or one before, has no input,
        JobFailed and Abandoned.
        """

        def checked() -> _Result:
            if self._schedule is not schedule:
                raise _StopsEarlier
            result = ready()
            if not result and (failure := self._input_failure(step)) is not None:
                raise _InputFailed(failure)
            return result

        return await self._waiting.until(checked)

    def _input_failure(self, step: int) -> node_pb2.Failure | None:
        """The failure because of which this step, or one before, has no input."""
        failure = None if self._epoch is None else self._epoch.input_failure
        return failure if failure is not None and failure.step <= step else None

    async def _results(self, schedule: StepSchedule) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        """Yields the outputs and the checkpoints of all steps. Raises as _until."""
        has_outputs = bool(self._plan().coordinator.outputs)
        shown = self._parts.clock.monotonic()
        for step in schedule.steps_for_client(has_outputs=has_outputs):
            if has_outputs and schedule.outputs_leave(step) and step > self._client.shown_step:
                outputs = await self._until(self._take_outputs, schedule, step)
                yield coordinator_pb2.ExecuteResponse(outputs=outputs)
                if self._parts.clock.monotonic() - shown > PROGRESS_SECONDS:
                    shown = self._parts.clock.monotonic()
                    self._owner.progressed(step, schedule.num_steps)
            if schedule.keeps_snapshot(step) and step not in self._client.announced:
                await self._until(lambda step=step: self.has_snapshot(step), schedule, step)  # type: ignore[misc]
                ready = coordinator_pb2.CheckpointReady(step=step)
                if self._begin.wants_input_states:

                    def states(step: int = step) -> list[bytes]:
                        return self._current().input_states(step)

                    ready.input_states.extend(await self._until(states, schedule, step))
                self._client.announced.add(step)
                yield coordinator_pb2.ExecuteResponse(checkpoint=ready)

    def input_failed(self, failure: node_pb2.Failure) -> bool:
        """Notes that a step has no input; the client gets the results of those before.

        A loader of which a process is killed is such a failure the second time, at the same step or an earlier one: the
        first time, memory may have been short.

        Returns:
            Whether it is one, of an epoch of this execution.
        """
        if failure.kind == node_pb2.Failure.KIND_NODE and 0 < failure.step <= self._killed_at:
            failure.kind = node_pb2.Failure.KIND_INPUT
        elif failure.kind == node_pb2.Failure.KIND_NODE:
            self._killed_at = max(self._killed_at, failure.step)
        if failure.kind != node_pb2.Failure.KIND_INPUT or not failure.step or self._epoch is None:
            return False
        if not self._epoch.over:  # else another epoch has the step, or none
            self._epoch.input_failed(failure)
            self._changes.notify()
        return True

    def state_sent(self, sent: coordinator_pb2.StateSent) -> None:
        """Notes that the client has written the states, or had none to write."""
        self._sent = sent
        self._changes.notify()

    @property
    def waits_for_client(self) -> bool:
        """Whether the steps do not run yet, and the client has not answered to the present attempt."""
        return not self._client.is_started and self._answer() is None

    def consumed(self, step: int) -> None:
        """Notes that the client has run the closures of all steps up to this one."""
        self._client.consumed_step = max(self._client.consumed_step, step)
        last = self._schedule.num_steps
        if step >= last or self._input_failure(last) is not None:  # no other step is waited for
            self._changes.notify()
        if self._epoch is not None and self._epoch.results is not None:
            self._epoch.results.consumed(step)

    def checkpoint_released(self, step: int) -> None:
        """Notes that the client no longer needs the snapshot of this step."""
        self._client.released.add(step)
        self._changes.notify()
        self._nodes.release_snapshot(step)

    def stop_after(self, step: int) -> None:
        """Makes this the last step, as the client has left its loop after it; see StopAfter."""
        if step < self._begin.num_steps and self.is_started:
            self._begin.num_steps = step
            self._has_input_failure = False
            self._schedule = StepSchedule.from_start(self._start_from(0))
            if self._points is not None:
                self._points.stop_after(step)
        self.consumed(step)

    @property
    def is_too_far(self) -> bool:
        """Whether the epoch has more steps than the client wants."""
        epoch = self._epoch
        return epoch is not None and epoch.schedule.global_step(epoch.schedule.num_steps) > self._begin.num_steps

    async def wait_for_snapshot(self, step: int) -> None:
        """Waits until all state keepers have the snapshot of a step that was announced. Raises JobFailed, Abandoned."""
        if step in self._client.announced and step not in self._client.released:
            await self._waiting.until(lambda: self.has_snapshot(step))

    def has_snapshot(self, step: int) -> bool:
        """Whether all state keepers have the snapshot of a step."""
        return self._epoch is not None and self._epoch.has_snapshot(step)

    @property
    def is_left(self) -> bool:
        """Whether the states at the end are those of the last recovery point, after whichever step that is."""
        return self.is_abandoned_by_client or (self._points is not None and self._points.stopped_at_point())

    def abandon(self) -> None:
        """Ends all waits with Abandoned, as the client has left. Has no effect on an execution that ends already."""
        if not self._is_ending:
            self.is_abandoned_by_client = True
            self._waiting.abandon()

    # --- from the beginning to the end --------------------------------------------------------------------------------

    async def load(self) -> None:
        """Loads the plan into all nodes and opens all links. Raises JobFailed, Abandoned, EpochOver."""
        point = None
        if self._points is not None and self._keeps_nothing and self.index > 1:  # the first has none to restore
            try:
                point = self._points.usable_start()
            except NoRecoveryPoint as error:
                lost = f"the states that this execution begins with are lost: {error}"
                failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=lost)
                raise self._parts.verdict.fail(failure) from error
        epoch = self._begin_epoch(0, point)
        self._keeps_nothing = True
        await epoch.load()
        missing, shards = sorted(epoch.missing), self._nodes.state_shards()
        self._wanted = coordinator_pb2.StateWanted(missing=missing, shards=shards, attempt=epoch.number)
        self._changes.notify()

    async def wait_for_states(self) -> None:
        """Waits until the client has written the states that it has. Raises JobFailed, Abandoned, EpochOver."""
        await self._waiting.until(self._answer, epoch=self._current())

    async def start(self) -> None:
        """Starts the steps; returns when the states that the client has written are in a recovery point.

        Raises JobFailed, Abandoned, EpochOver.
        """
        epoch, sent = self._current(), self._answer()
        assert sent is not None
        if self._points is None:
            epoch.start()
        else:
            points = self._points
            first = 0 if points.has_start() and not sent.wrote else points.make_first(epoch.number)
            epoch.start(recovery_point=first, last_recovery_point=points.make_last(epoch.number))
            await self._waiting.until(lambda: points.has(first), epoch=epoch)
            points.forget_before(first)  # an older point, if the first one could not be written, has outdated states
        self._owner.started(self.index)
        self._client.is_started = True
        self._changes.notify()

    async def wait_for_end(self) -> None:
        """Waits until all steps are done, and the client has consumed all outputs and has released all checkpoints.

        A death before the last recovery point is complete reverts that. Returns earlier if the epoch goes too far.
        Raises JobFailed, Abandoned, EpochOver.
        """

        def is_over() -> bool:
            # State keepers keep the last snapshot until Stop. Until the last step the client may leave its loop.
            has_all = self._has_all and self._is_received(self._schedule.num_steps)
            return self.is_too_far or (has_all and self._has_ended())

        await self._waiting.until(is_over, epoch=self._current())
        if not self.is_too_far:
            self._owner.progressed(self._schedule.num_steps, self.num_asked_steps)
            self._is_ending = True

    async def stop(self) -> Sequence[Member]:
        """Ends the execution on all nodes, at any step. The states stay. Raises JobFailed.

        Returns:
            The nodes that did not stop in time.
        """
        # The wait for the nodes must not end early: a link that closes before its node stops is a failure.
        self._is_ending, self._waiting.abandoned = True, False
        epoch = self._epoch
        if epoch is None:
            return ()
        late = () if epoch.over else await epoch.stop(self._nodes.live_members())
        await epoch.close()
        self.is_stopped = not self.is_abandoned_by_client
        self._changes.notify()
        return late

    async def close(self) -> None:
        """Closes the links, as the job is over."""
        self._is_ending, self._waiting.abandoned = True, False
        if self._epoch is not None:
            await self._epoch.close()

    # --- recovery -----------------------------------------------------------------------------------------------------

    def epoch_over(self) -> None:
        """Marks the epoch as over after a death or the loss of a link."""
        if self._epoch is not None:
            self._epoch.finish()
            self._changes.notify()

    async def end_epoch(self, members: Sequence[Member]) -> Sequence[Member]:
        """Ends the epoch on the living nodes; returns those that do not answer. Raises JobFailed, Abandoned."""
        epoch = self._epoch
        if epoch is None:
            return ()
        late = await epoch.stop(members)
        await epoch.close()
        return late

    async def resume(self) -> int:
        """Runs the remaining steps in a new epoch, from the last recovery point; returns its step.

        Raises JobFailed, Abandoned, EpochOver, NoRecoveryPoint.
        """
        assert self._points is not None
        point = self._points.usable()
        done_steps = self._points.done_steps(point)
        epoch = self._begin_epoch(done_steps, point)
        await epoch.load()
        if done_steps == self._schedule.num_steps:
            self._points.end_at(point)
            epoch.start()
        else:
            epoch.start(last_recovery_point=self._points.make_last(epoch.number))
        assert epoch.results is not None
        epoch.results.consumed(self._client.consumed_step)
        self._changes.notify()
        return done_steps

    def restore_initial_states(self) -> None:
        """Makes the next load restore the initial states, as state keepers may have lost them."""
        self._keeps_nothing = True

    async def restore(self, *, from_any_step: bool) -> None:
        """Restores the states after the execution into the state keepers. Raises as resume.

        Args:
            from_any_step: accept a point after any step; otherwise only the one after the last step.
        """
        assert self._points is not None
        if not from_any_step and not self._points.has_end():
            raise NoRecoveryPoint(
                "no recovery point has the states after the last step, as that one could not be written: make room "
                "where recovery points are kept, and start the script again from its last checkpoint"
            )
        await self._make_epoch(self._schedule.num_steps, self._points.usable()).restore()

    def keep_point(self, step: int) -> bool:
        """Requests a recovery point at or soon after a step that no node has reached; False if there can be none."""
        assert self._points is not None
        epoch = self._current()
        return not epoch.over and self._points.make_next(epoch.number, step)

    def may_keep_point(self) -> bool:
        """Whether a recovery point may be made: the client is reading no snapshot, which only the earlier point has."""
        return self._client.is_started and self._client.announced <= self._client.released

    def reporting(self) -> list[str]:
        """The members that run steps, and so send a report about once a second."""
        return [] if self._epoch is None else self._epoch.reporting()

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        """Notes a node's response."""
        if self._epoch is None:
            return
        self._epoch.responded(member, response)
        if response.WhichOneof("kind") == "snapshot" and response.snapshot.step in self._client.released:
            self._nodes.release_snapshot(response.snapshot.step)  # the step is run again
        if response.WhichOneof("kind") == "input_state" and self._points is not None:
            state = response.input_state
            self._points.input_state(member.name, state.step, state.state)
        self._changes.notify()

    def _found(self, finding: str) -> None:
        if finding not in self._findings:
            self._findings.append(finding)
            self._owner.found(finding)

    def settle_point(self) -> None:
        """Completes recovery points that lack nothing; after a point share or a message of the client."""
        if self._points is not None:
            self._points.settle()
            self._changes.notify()

    def _current(self) -> Epoch:
        assert self._epoch is not None, "it is loaded"
        return self._epoch

    def _plan(self) -> plan_pb2.Plan:
        return self._owner.plan(self._begin.artifact)

    def _start_from(self, done_steps: int, number: int = 0) -> node_pb2.Start:
        begin = self._begin
        return node_pb2.Start(
            epoch=number,
            num_steps=begin.num_steps,
            activation_steps=begin.activation_steps,
            checkpoint_steps=begin.checkpoint_steps,
            run_ahead_steps=self._parts.run_ahead_steps,
            done_steps=done_steps,
        )

    def _begin_epoch(self, done_steps: int, point: RecoveryPoint | None) -> Epoch:
        epoch = self._make_epoch(done_steps, point)
        self._owner.epoch_began(self.index, epoch.number)
        return epoch

    def _make_epoch(self, done_steps: int, point: RecoveryPoint | None) -> Epoch:
        shown_step, labels = self._client.shown_step, self._begin.labels

        def on_scalars(step: int, values: Mapping[str, float]) -> None:
            if step > shown_step:  # others were reported in an earlier epoch
                self._owner.scalars(step, {labels.get(name, name): value for name, value in values.items()})

        def on_outputs(seconds: float) -> None:
            asyncio.get_running_loop().call_later(seconds, self._changes.notify)

        self._epoch = Epoch(
            begin=self._begin,
            plan=self._plan(),
            start=self._start_from(done_steps, self._owner.next_epoch()),
            point=point,
            nodes=self._nodes,
            links=self._parts.links,
            verdict=self._parts.verdict,
            waiting=self._waiting,
            on_outputs=on_outputs,
            on_failure=self._owner.link_failed,
            on_scalars=on_scalars,
            on_finding=self._found,
        )
        return self._epoch

    def _new_attempt(self, last: int) -> coordinator_pb2.StateWanted | bool:
        """The states that an attempt after the last one wants of the client; True if the steps have started."""
        if self._client.is_started:
            return True
        return self._wanted if self._wanted is not None and self._wanted.attempt > last else False

    def _answer(self) -> coordinator_pb2.StateSent | None:
        """The client's answer to the present attempt."""
        return self._sent if self._sent is not None and self._sent.attempt == self.number else None

    def _is_received(self, step: int) -> bool:
        """Whether the client has all outputs and checkpoints up to a step."""
        has_outputs = bool(self._plan().coordinator.outputs)
        return self._client.has_all(
            (each for each in self._schedule.checkpoint_steps if each <= step),
            self._schedule.last_output_step(step) if has_outputs else 0,
        )

    def _has_ended(self) -> bool:
        """Whether all steps are done, and their states cannot be lost."""
        epoch = self._current()
        if not epoch.all_finished:
            return False
        return self._points is None or self._points.has(epoch.last_recovery_point)

    def _take_outputs(self) -> coordinator_pb2.OutputBatch | None:
        """The outputs to send to the client now; None if there are too few for a batch."""
        epoch = self._epoch
        taken = None if epoch is None or epoch.results is None else epoch.results.take()
        # The client already has the outputs of steps that run again.
        steps = [] if taken is None else [step for step in taken.steps if step.step > self._client.shown_step]
        if not steps:
            return None
        self._client.shown_step = steps[-1].step
        return coordinator_pb2.OutputBatch(steps=steps)

"""An execution as the coordinator runs it, which is a sequence of epochs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from appliance.coordinator.execution.client_progress import ClientProgress
from appliance.coordinator.execution.epoch import Epoch
from appliance.coordinator.execution.failures import Verdict
from appliance.coordinator.execution.recovery_points import (
    ExecutionPoints,
    NoRecoveryPoint,
    RecoveryPoint,
    RecoveryPoints,
)
from appliance.coordinator.execution.results import BATCH_SECONDS, OnScalars
from appliance.coordinator.execution.waiting import Waiting
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from waferbox.links.listener import LinkListener
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

PROGRESS_SECONDS = 0.5


class CoordinatedExecution:
    """An execution as the coordinator runs it: a sequence of epochs. Each output is sent to the client once, in order.

    load, start, responses and stop are called in the thread of the client's call; end_epoch, resume and restore in that
    of the recovery. All of these except responses send commands to nodes, and are called with Recovery.lock held. Other
    methods can be called from any thread.
    """

    def __init__(
        self,
        *,
        index: int,
        begin: coordinator_pb2.Begin,
        plan: Callable[[], plan_pb2.Plan],
        progress: ClientProgress,
        follows_left: bool,
        loses_states: bool,
        run_ahead_steps: int,
        nodes: JobMembers,
        listener: LinkListener,
        verdict: Verdict,
        points: RecoveryPoints | None,
        is_interrupted: Callable[[], bool],
        next_number: Callable[[], int],
        on_epoch: Callable[[int], None],
        on_started: Callable[[int], None],
        on_failure: Callable[[node_pb2.Failure], None],
        on_progress: Callable[[int], None],
        on_scalars: OnScalars,
        on_advice: Callable[[str], None],
    ) -> None:
        """Makes an execution without an epoch; load or resume begins the first.

        Args:
            index: number of the execution in the job, from 1.
            begin: the client's request.
            plan: returns the plan for the present number of wafers.
            progress: of the client, if a coordinator of an earlier incarnation began the execution.
            follows_left: whether the client left the previous execution before its end.
            loses_states: whether the nodes may have lost the states of the previous execution.
            run_ahead_steps: steps with outputs that may wait for the client.
            nodes: the members of the job.
            listener: accepts the coordinator's links.
            verdict: the reason why the job ends.
            points: the recovery points of the job; None: a death ends the job.
            is_interrupted: whether a node or a link is missing now.
            next_number: returns the number of a new epoch.
            on_epoch: called with the number of an epoch whose steps will run.
            on_started: called with index when nothing that the client has sent can be lost any more.
            on_failure: called when a link of the coordinator is lost.
            on_progress: called with a step at intervals while outputs are sent, and after the last step.
            on_scalars: called with sampled outputs; see Results.
            on_advice: called with a warning for the user, possibly several times with the same one.
        """
        self.index = index
        self._begin = begin
        self._plan = plan
        self._run_ahead_steps = run_ahead_steps
        self._nodes = nodes
        self._listener = listener
        self._verdict = verdict
        self._client = progress
        self._next_number = next_number
        self._on_epoch = on_epoch
        self._on_started = on_started
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._on_scalars = on_scalars
        self._on_advice = on_advice
        self._schedule = StepSchedule.from_start(self._start_from(0))
        self._points: ExecutionPoints | None = None
        if points is not None:
            self._points = ExecutionPoints(
                points,
                nodes,
                execution=index,
                follows_left=follows_left,
                num_steps=self._schedule.num_steps,
                wants_input_states=begin.wants_input_states,
                is_received=self._is_received,
            )
        self._waiting = Waiting(verdict, is_interrupted)
        self._epoch: Epoch | None = None
        self._is_ending = self.is_abandoned_by_client = False
        self._attempt = 0  # the epoch of the last StateWanted
        self._keeps_nothing = loses_states  # state keepers may have lost the states of the previous execution
        self._sent: coordinator_pb2.StateSent | None = None  # the client's answer to an attempt

    @property
    def number(self) -> int:
        """The number of the epoch; 0 before the first."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.number

    @property
    def is_started(self) -> bool:
        """Whether the steps run and nothing that the client has sent can be lost."""
        return self._client.is_started

    @property
    def was_started(self) -> bool:
        """Whether the coordinator of an earlier incarnation has sent Started to the client."""
        return self._begin.resumption.started

    @property
    def shown_step(self) -> int:
        """The last step whose outputs were sent to the client."""
        return self._client.shown_step

    @property
    def is_epoch_over(self) -> bool:
        """Whether no epoch runs, so that the end of a link is no failure."""
        epoch = self._epoch
        return epoch is None or epoch.over

    # --- the client's call --------------------------------------------------------------------------------------------

    def load(self) -> coordinator_pb2.StateWanted:
        """Loads the plan into all nodes and opens all links. Raises JobFailed, Abandoned, EpochOver."""
        point = None
        if self._points is not None and self._keeps_nothing and self.index > 1:  # the first has none to restore
            try:
                point = self._points.usable_start()
            except NoRecoveryPoint as error:
                lost = f"the states that this execution begins with are lost: {error}"
                raise self._verdict.fail(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=lost)) from error
        epoch = self._begin_epoch(0, point)
        self._attempt, self._keeps_nothing = epoch.number, True
        epoch.load()
        missing, shards = sorted(epoch.missing), self._nodes.state_shards()
        return coordinator_pb2.StateWanted(missing=missing, shards=shards, attempt=self._attempt)

    def state_sent(self, sent: coordinator_pb2.StateSent) -> None:
        """Notes that the client has written the states, or had none to write."""
        with self._waiting.changed:
            self._sent = sent
            self._waiting.changed.notify_all()

    def requests_ended(self) -> None:
        """Notes the end of the client's requests; before the steps run the client abandons the execution with it."""
        if not self._client.is_started and self._answer() is None:
            self.abandon()

    def start(self) -> None:
        """Waits for the client's states and starts the steps; returns when the states are in a recovery point.

        Raises JobFailed, Abandoned, EpochOver.
        """
        epoch = self._current()
        sent = self._waiting.until(self._answer, epoch=epoch)
        assert sent is not None
        if self._points is None:
            epoch.start()
        else:
            points = self._points
            first = 0 if points.has_start() and not sent.wrote else points.make_first(epoch.number)
            epoch.start(recovery_point=first, last_recovery_point=points.make_last(epoch.number))
            self._waiting.until(lambda: points.has(first), epoch=epoch)
            points.forget_before(first)  # an older point, if the first one could not be written, has outdated states
        self._on_started(self.index)
        with self._waiting.changed:
            self._client.is_started = True

    def responses(self) -> Iterator[coordinator_pb2.ExecuteResponse]:
        """Yields outputs and checkpoints in the order of the steps. Raises JobFailed, Abandoned."""
        shown = time.monotonic()
        has_outputs = bool(self._plan().coordinator.outputs)
        for step in self._schedule.steps_for_client(has_outputs=has_outputs):
            if has_outputs and self._schedule.outputs_leave(step) and step > self._client.shown_step:
                while (outputs := self._waiting.until(self._take_outputs, BATCH_SECONDS)) is None:
                    pass  # after BATCH_SECONDS outputs leave even if they are too few for a batch
                yield coordinator_pb2.ExecuteResponse(outputs=outputs)
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    self._on_progress(step)
            if self._schedule.keeps_snapshot(step) and step not in self._client.announced:
                self._waiting.until(lambda step=step: self._current().has_snapshot(step))  # type: ignore[misc]
                ready = coordinator_pb2.CheckpointReady(step=step, input_states=self._take_input_states(step))
                with self._waiting.changed:
                    self._client.announced.add(step)
                yield coordinator_pb2.ExecuteResponse(checkpoint=ready)

    def wait_until_done(self) -> None:
        """Waits until all steps are done and the client has released all checkpoints. Raises JobFailed, Abandoned."""
        self._waiting.until(lambda: self.is_done)
        self._on_progress(self._schedule.num_steps)

    @property
    def is_done(self) -> bool:
        """Whether the execution can be stopped. A death before the last recovery point is complete reverts it."""
        # State keepers keep the last snapshot until Stop, so the client must have released it.
        return self._schedule.checkpoint_steps <= self._client.released and self._has_ended()

    def finished(self) -> coordinator_pb2.ExecuteResponse:
        """The last message, after stop."""
        epoch = self._current()
        # A worker sends the state of its loader after the last step before it sends Finished.
        states = epoch.input_states(self._schedule.num_steps) if self._begin.wants_input_states else ()
        finished = coordinator_pb2.ExecutionFinished(seconds=epoch.seconds, input_states=states)
        return coordinator_pb2.ExecuteResponse(finished=finished)

    def consumed(self, step: int) -> None:
        """Notes that the client has run the closures of all steps up to this one."""
        with self._waiting.changed:
            self._client.consumed_step = max(self._client.consumed_step, step)
            epoch = self._epoch
            if step >= self._schedule.num_steps:  # no other step is waited for
                self._waiting.changed.notify_all()
        if epoch is not None and epoch.results is not None:
            epoch.results.consumed(step)

    def checkpoint_released(self, step: int) -> None:
        """Notes that the client no longer needs the snapshot of this step."""
        with self._waiting.changed:
            self._client.released.add(step)
            self._waiting.changed.notify_all()
        self._nodes.release_snapshot(step)

    def wait_for_snapshot(self, step: int) -> None:
        """Waits until all state keepers have the snapshot of a step that was announced. Raises JobFailed."""
        with self._waiting.changed:
            if step not in self._client.announced or step in self._client.released:
                return
        self._waiting.until(lambda: self._epoch is not None and self._epoch.has_snapshot(step))

    def abandon(self) -> None:
        """Ends all waits with Abandoned, as the client has left. Has no effect on an execution that ends already."""
        with self._waiting.changed:
            if not self._is_ending:
                self.is_abandoned_by_client = True
                self._waiting.abandon()

    def stop(self) -> None:
        """Ends the execution on all nodes, at any step. The states stay. Raises JobFailed."""
        with self._waiting.changed:
            # The wait for the nodes must not end early: a link that closes before its node stops is a failure.
            self._is_ending, self._waiting.abandoned = True, False
        if self._epoch is not None and not self._epoch.over:
            late = self._epoch.stop(self._nodes.live_members())
            if late:
                message = f"{', '.join(member.name for member in late)} did not stop in time"
                kind = node_pb2.Failure.KIND_NODE
                self._on_failure(node_pb2.Failure(kind=kind, node=late[0].name, message=message))

    def close(self) -> None:
        """Closes the links; after stop, or when the job is over."""
        with self._waiting.changed:
            self._is_ending, self._waiting.abandoned = True, False
        if self._epoch is not None:
            self._epoch.close()

    # --- recovery -----------------------------------------------------------------------------------------------------

    def epoch_over(self) -> None:
        """Marks the epoch as over after a death or the loss of a link."""
        if self._epoch is not None:
            self._epoch.finish()

    def end_epoch(self, members: Sequence[Member]) -> Sequence[Member]:
        """Ends the epoch on the living nodes; returns those that do not answer. Raises JobFailed."""
        epoch = self._epoch
        if epoch is None:
            return ()
        late = epoch.stop(members)
        epoch.close()
        return late

    def resume(self) -> int:
        """Runs the remaining steps in a new epoch, from the last recovery point; returns its step.

        Raises JobFailed, Abandoned, EpochOver, NoRecoveryPoint.
        """
        assert self._points is not None
        point = self._points.usable()
        done_steps = self._points.done_steps(point)
        epoch = self._begin_epoch(done_steps, point)
        epoch.load()
        is_done = done_steps == self._schedule.num_steps
        epoch.start(last_recovery_point=0 if is_done else self._points.make_last(epoch.number))
        assert epoch.results is not None
        epoch.results.consumed(self._client.consumed_step)
        return done_steps

    def restore_initial_states(self) -> None:
        """Makes the next load restore the initial states, as state keepers may have lost them."""
        self._keeps_nothing = True

    def restore(self, *, from_any_step: bool) -> None:
        """Restores the states after the execution into the state keepers. Raises as resume.

        Args:
            from_any_step: accept a point after any step; otherwise only the one after the last step.
        """
        assert self._points is not None
        if not from_any_step and not self._points.has_end():
            raise NoRecoveryPoint("no recovery point has the states after the last step")
        self._make_epoch(self._schedule.num_steps, self._points.usable()).restore()

    def keep_point(self, step: int) -> bool:
        """Requests a recovery point at or soon after a step that no node has reached; False if there can be none."""
        assert self._points is not None
        epoch = self._current()
        return not epoch.over and self._points.make_next(epoch.number, step)

    def may_keep_point(self) -> bool:
        """Whether a recovery point may be made: the client is reading no snapshot, which only the earlier point has."""
        with self._waiting.changed:
            return self._client.is_started and self._client.announced <= self._client.released

    def reporting(self) -> list[str]:
        """The members that run steps, and so send a report about once a second."""
        with self._waiting.changed:
            return [] if self._epoch is None else self._epoch.reporting()

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        """Notes a node's response."""
        with self._waiting.changed:
            epoch = self._epoch
            if epoch is None:
                return
            epoch.responded(member, response)
            step = response.snapshot.step
            self._waiting.changed.notify_all()
        if response.WhichOneof("kind") == "snapshot" and step in self._client.released:
            self._nodes.release_snapshot(step)  # the step is run again
        if response.WhichOneof("kind") == "input_state" and self._points is not None:
            state = response.input_state
            self._points.input_state(member.name, state.step, state.state)

    def settle_point(self) -> None:
        """Completes recovery points that lack nothing; after a point share or a message of the client."""
        if self._points is not None:
            self._points.settle()
            self._waiting.wake()

    def wake(self) -> None:
        """Makes waits check their conditions again."""
        self._waiting.wake()

    def _current(self) -> Epoch:
        assert self._epoch is not None, "it is loaded"
        return self._epoch

    def _start_from(self, done_steps: int, number: int = 0) -> node_pb2.Start:
        begin = self._begin
        return node_pb2.Start(
            epoch=number,
            num_steps=begin.num_steps,
            activation_steps=begin.activation_steps,
            checkpoint_steps=begin.checkpoint_steps,
            run_ahead_steps=self._run_ahead_steps,
            done_steps=done_steps,
        )

    def _begin_epoch(self, done_steps: int, point: RecoveryPoint | None) -> Epoch:
        epoch = self._make_epoch(done_steps, point)
        self._on_epoch(epoch.number)
        return epoch

    def _make_epoch(self, done_steps: int, point: RecoveryPoint | None) -> Epoch:
        shown_step = self._client.shown_step

        def on_scalars(step: int, values: Mapping[str, float]) -> None:
            if step > shown_step:  # others were reported in an earlier epoch
                self._on_scalars(step, values)

        epoch = Epoch(
            begin=self._begin,
            plan=self._plan(),
            start=self._start_from(done_steps, self._next_number()),
            point=point,
            nodes=self._nodes,
            listener=self._listener,
            verdict=self._verdict,
            waiting=self._waiting,
            on_failure=self._on_failure,
            on_scalars=on_scalars,
            on_advice=self._on_advice,
        )
        with self._waiting.changed:
            self._epoch = epoch
        return epoch

    def _answer(self) -> coordinator_pb2.StateSent | None:
        return self._sent if self._sent is not None and self._sent.attempt == self._attempt else None

    def _is_received(self, step: int) -> bool:
        """Whether the client has all outputs and checkpoints up to this step, which then need not run again."""
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
        is_kept = self._points is None or self._points.has(epoch.last_recovery_point)
        # Read last: a point that is given up because the epoch is over also counts as complete.
        return is_kept and not epoch.over

    def _take_outputs(self) -> coordinator_pb2.OutputBatch | None:
        """The outputs to send to the client now; None if there are too few for a batch."""
        epoch = self._current()
        taken = None if epoch.results is None else epoch.results.take()
        # The client already has the outputs of steps that run again.
        steps = [] if taken is None else [step for step in taken.steps if step.step > self._client.shown_step]
        if not steps:
            return None
        self._client.shown_step = steps[-1].step
        return coordinator_pb2.OutputBatch(steps=steps)

    def _take_input_states(self, step: int) -> list[bytes]:
        """The states of all workers' loaders after a step; waits for them."""
        if not self._begin.wants_input_states:
            return []
        self._waiting.until(lambda: self._current().input_states(step))
        with self._waiting.changed:
            return self._current().input_states(step)

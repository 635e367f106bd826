"""One execution: its epochs, one after the other, and what the client hears of it: each output once, in order."""

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
    """load, start, responses, stop: in the thread of the client's call. end_epoch, resume, restore: in the recovery's.

    Who commands the nodes (all of these but responses) holds the job's lock for that. Other methods: from any thread.
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
        on_started: Callable[[int], None],
        on_failure: Callable[[node_pb2.Failure], None],
        on_progress: Callable[[int], None],
        on_scalars: OnScalars,
        on_advice: Callable[[str], None],
    ) -> None:
        """Of a job, the index-th, counted from 1. plan(): for the wafers that the job has.

        progress: of the client, where it has begun with another coordinator. follows_left: whether the execution before
        was left before its end. loses_states: whether the nodes may have lost what they kept before. points: None where
        a death ends the job. is_interrupted: whether a node is missing now. next_number: of the next epoch.
        on_started(index): nothing that the client has sent can be lost. on_failure: a link of the coordinator's is
        lost. on_progress(step) is called now and then while the client gets its outputs, and when all steps are done.
        on_scalars: as Results has it. on_advice: what the user should know, perhaps again and again.
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
        self._is_closed = self.is_abandoned_by_client = False  # by its client, before its end
        self._attempt = 0  # the epoch in which the client was asked for states last
        self._keeps_nothing = loses_states  # whoever keeps states may have lost them since the last execution
        self._sent: coordinator_pb2.StateSent | None = None  # the client's answer to an attempt

    @property
    def number(self) -> int:
        """Of the epoch; 0 if there is none."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.number

    @property
    def is_started(self) -> bool:
        """Whether the client has done all that it has to do before the steps."""
        return self._client.is_started

    @property
    def was_started(self) -> bool:
        """Whether the client had been told so by another coordinator."""
        return self._begin.resumption.started

    @property
    def shown_step(self) -> int:
        """The last whose outputs the client was given."""
        return self._client.shown_step

    @property
    def is_epoch_over(self) -> bool:
        """Whether links end now, and nobody is to blame."""
        epoch = self._epoch
        return epoch is None or epoch.over

    # --- what the client asks for -------------------------------------------------------------------------------------

    def load(self) -> coordinator_pb2.StateWanted:
        """Load the plan into all nodes and open all links. Raises JobFailed, Abandoned, EpochOver."""
        point = None
        if self._points is not None and self._keeps_nothing and self.index > 1:  # the first begins with nothing
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
        """The client has written the states, or has found that it need not."""
        with self._waiting.changed:
            self._sent = sent
            self._waiting.changed.notify_all()

    def requests_ended(self) -> None:
        """The client says nothing more: before the steps run, that it does not want them."""
        if not self._client.is_started and self._answer() is None:
            self.abandon()

    def start(self) -> None:
        """Once the states have been written, let all nodes begin; returns when their loss would be no loss.

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
            points.forget_before(first)  # what is still complete, if this one could not be
        self._on_started(self.index)
        with self._waiting.changed:
            self._client.is_started = True

    def responses(self) -> Iterator[coordinator_pb2.ExecuteResponse]:
        """Outputs and checkpoints in the order of the steps. Raises JobFailed, Abandoned."""
        shown = time.monotonic()
        has_outputs = bool(self._plan().coordinator.outputs)
        for step in self._schedule.steps_for_client(has_outputs=has_outputs):
            if has_outputs and self._schedule.outputs_leave(step) and step > self._client.shown_step:
                while (outputs := self._waiting.until(self._take_outputs, BATCH_SECONDS)) is None:
                    pass  # outputs that are too few for a batch may go by now
                yield coordinator_pb2.ExecuteResponse(outputs=outputs)
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    self._on_progress(step)
            if self._schedule.keeps_snapshot(step) and step not in self._client.told:
                self._waiting.until(lambda step=step: self._current().has_snapshot(step))  # type: ignore[misc]
                ready = coordinator_pb2.CheckpointReady(step=step, input_states=self._take_input_states(step))
                with self._waiting.changed:
                    self._client.told.add(step)
                yield coordinator_pb2.ExecuteResponse(checkpoint=ready)

    def wait_until_done(self) -> None:
        """Until all steps are, and the client has taken all checkpoints. Raises JobFailed, Abandoned."""
        self._waiting.until(lambda: self.is_done)
        self._on_progress(self._schedule.num_steps)

    @property
    def is_done(self) -> bool:
        """Whether it can be stopped. A death undoes it where the states after the last step are not kept yet."""
        # The nodes keep the last snapshot until they are told to stop.
        return self._schedule.checkpoint_steps <= self._client.taken and self._has_ended()

    def finished(self) -> coordinator_pb2.ExecuteResponse:
        """The last message, after stop."""
        epoch = self._current()
        # Nobody has finished before the states of his loader after the last step have come.
        states = epoch.input_states(self._schedule.num_steps) if self._begin.wants_input_states else ()
        finished = coordinator_pb2.ExecutionFinished(seconds=epoch.seconds, input_states=states)
        return coordinator_pb2.ExecuteResponse(finished=finished)

    def consumed(self, step: int) -> None:
        """The client has done with the outputs of all steps up to this one."""
        with self._waiting.changed:
            self._client.consumed_step = max(self._client.consumed_step, step)
            epoch = self._epoch
            if step >= self._schedule.num_steps:  # the one that is waited for
                self._waiting.changed.notify_all()
        if epoch is not None and epoch.results is not None:
            epoch.results.consumed(step)

    def checkpoint_taken(self, step: int) -> None:
        """The client needs the snapshot of this step no more."""
        with self._waiting.changed:
            self._client.taken.add(step)
            self._waiting.changed.notify_all()
        self._nodes.release_snapshot(step)

    def wait_for_snapshot(self, step: int) -> None:
        """Until all who keep states have the snapshot of a step, of which the client was told. Raises JobFailed."""
        with self._waiting.changed:
            if step not in self._client.told or step in self._client.taken:
                return
        self._waiting.until(lambda: self._epoch is not None and self._epoch.has_snapshot(step))

    def abandon(self) -> None:
        """The client is not there any more: whatever waits raises Abandoned."""
        if not self._is_closed:
            self.is_abandoned_by_client = True
            self._waiting.abandon()

    def stop(self) -> None:
        """End the execution on all nodes, wherever it is. The state stays. Raises JobFailed."""
        with self._waiting.changed:
            self._waiting.abandoned = False
        if self._epoch is not None and not self._epoch.over:
            late = self._epoch.stop(self._nodes.live_members())
            if late:
                message = f"{', '.join(member.name for member in late)} did not stop in time"
                kind = node_pb2.Failure.KIND_NODE
                self._on_failure(node_pb2.Failure(kind=kind, node=late[0].name, message=message))

    def close(self) -> None:
        """Let go of the links; after stop, or because the job is over."""
        with self._waiting.changed:
            self._is_closed, self._waiting.abandoned = True, False
        if self._epoch is not None:
            self._epoch.close()

    # --- recovery -----------------------------------------------------------------------------------------------------

    def epoch_over(self) -> None:
        """Somebody has died, or a link is lost: nothing that ends from now on is news."""
        if self._epoch is not None:
            self._epoch.finish()

    def end_epoch(self, members: Sequence[Member]) -> Sequence[Member]:
        """End the epoch on those that live; returns those that do not answer. Raises JobFailed."""
        epoch = self._epoch
        if epoch is None:
            return ()
        late = epoch.stop(members)
        epoch.close()
        return late

    def resume(self) -> int:
        """Go on from the last recovery point, with the nodes that there are; returns its step.

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
        """Whoever keeps states may have lost them: if no step has run, those that it begins with are put back first."""
        self._keeps_nothing = True

    def restore(self, *, from_any_step: bool) -> None:
        """After it: put the states back on those who keep them. Raises as resume.

        from_any_step: whether the states may be those after any of its steps, and not only after the last.
        """
        assert self._points is not None
        if not from_any_step and not self._points.has_end():
            raise NoRecoveryPoint("its states after the last step could not be kept anywhere")
        self._begin_epoch(self._schedule.num_steps, self._points.usable()).restore()

    def keep_point(self, step: int) -> bool:
        """Have a recovery point made after this step, which is not reached yet, or soon after; False if it has none."""
        assert self._points is not None
        epoch = self._current()
        return not epoch.over and self._points.make_next(epoch.number, step)

    def may_keep_point(self) -> bool:
        """Whether the client waits for nothing that would be lost with an earlier one: it reads no snapshot."""
        with self._waiting.changed:
            return self._client.is_started and self._client.told <= self._client.taken

    def reporting(self) -> list[str]:
        """The members that run steps now, and say about once a second how far they are."""
        with self._waiting.changed:
            return [] if self._epoch is None else self._epoch.reporting()

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        """A node has got somewhere."""
        with self._waiting.changed:
            epoch = self._epoch
            if epoch is None:
                return
            epoch.responded(member, response)
            step = response.snapshot.step
            self._waiting.changed.notify_all()
        if response.WhichOneof("kind") == "snapshot" and step in self._client.taken:
            self._nodes.release_snapshot(step)  # the step is run again
        if response.WhichOneof("kind") == "input_state" and self._points is not None:
            state = response.input_state
            self._points.input_state(member.name, state.step, state.state)

    def settle_point(self) -> None:
        """A node has kept something, or the client has got something."""
        if self._points is not None:
            self._points.settle()
            self._waiting.wake()

    def wake(self) -> None:
        """Something has changed that responses may wait for."""
        self._waiting.wake()

    def _current(self) -> Epoch:
        assert self._epoch is not None, "it is loaded"
        return self._epoch

    def _start_from(self, done_steps: int, number: int = 0) -> node_pb2.Start:
        begin = self._begin
        return node_pb2.Start(
            execution=number,
            num_steps=begin.num_steps,
            activation_steps=begin.activation_steps,
            checkpoint_steps=begin.checkpoint_steps,
            run_ahead_steps=self._run_ahead_steps,
            done_steps=done_steps,
        )

    def _begin_epoch(self, done_steps: int, point: RecoveryPoint | None) -> Epoch:
        shown_step = self._client.shown_step

        def on_scalars(step: int, values: Mapping[str, float]) -> None:
            if step > shown_step:  # else it was told in an earlier epoch
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
        """Whether the client has all that it gets of the steps up to this one, which are not run again then."""
        has_outputs = bool(self._plan().coordinator.outputs)
        return self._client.has_all(
            (each for each in self._schedule.checkpoint_steps if each <= step),
            self._schedule.last_output_step(step) if has_outputs else 0,
        )

    def _has_ended(self) -> bool:
        """Whether all steps are done, and nothing of their states can be lost."""
        epoch = self._current()
        if not epoch.all_finished:
            return False
        is_kept = self._points is None or self._points.has(epoch.last_recovery_point)
        return is_kept and not epoch.over  # asked last: what is given up when it is over is not kept

    def _take_outputs(self) -> coordinator_pb2.OutputBatch | None:
        """What the client has not got, if it pays to send it."""
        epoch = self._current()
        taken = None if epoch.results is None else epoch.results.take()
        # Steps that are run again give what the client has.
        steps = [] if taken is None else [step for step in taken.steps if step.step > self._client.shown_step]
        if not steps:
            return None
        self._client.shown_step = steps[-1].step
        return coordinator_pb2.OutputBatch(steps=steps)

    def _take_input_states(self, step: int) -> list[bytes]:
        """Where the loaders of all workers stand after a step; waits for them."""
        if not self._begin.wants_input_states:
            return []
        self._waiting.until(lambda: self._current().input_states(step))
        with self._waiting.changed:
            return self._current().input_states(step)

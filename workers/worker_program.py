"""The job of an input worker, and its step program, which sends batches from the input_fn's process to the wafer.

The process writes into a ring of slots that the wafer reads in place. A slot is requested again when the wafer has
acknowledged its batch. The process is therefore at most the ring ahead, and one batch that it holds itself.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from waferbox.input_process.messages import BatchLayout, TensorLayout
from waferbox.links.elements import tensor_bytes
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.node_job import JobContext, JobFailure, LinkKey
from waferbox.runtime.progress import Progress
from waferbox.runtime.role_job import RoleJob, report_failure
from waferbox.runtime.schedule import BATCH_SLOTS, StepSchedule, steps_of_worker
from workers.input_process import FirstBatch, InputProcess
from wsc.v1 import node_pb2, plan_pb2

PAGE_BYTES = 4096


class WorkerProgram:
    """The step program of one epoch on a worker. Owns the ring and the input_fn's process.

    Used by the thread of the steps, `interrupt` and `keep_state` aside. Raises ValueError for an inconsistent request.
    """

    def __init__(
        self,
        request: node_pb2.Load,
        prepared: node_pb2.PrepareInput,
        process: InputProcess,
        hub: Hub,
        link: Link,
        on_state: Callable[[int, bytes], None],
        on_digests: Callable[[FirstBatch], None],
    ) -> None:
        """
        Args:
            request: the plan, and the steps that are done.
            prepared: the request that the process was started with.
            process: the input_fn's process.
            hub: the hub of the links.
            link: the link to the wafer.
            on_state: called by `run` with the step and the loader's state, for each state that is due.
            on_digests: called by `run` with the digests of the first batch, if there are any.
        """
        plan = request.worker
        self.progress = Progress("input")
        self._begin = 0.0
        self._process = process
        self._hub = hub
        self._link = link
        self._group = plan.batch.id
        self._nbytes = plan.batch.nbytes
        self._worker = prepared.worker
        self._num_workers = max(1, prepared.num_workers)
        if request.done_steps % self._num_workers:
            raise ValueError(f"{request.done_steps} done steps are no multiple of {self._num_workers} workers")
        self._done_steps = request.done_steps
        self._state_steps = frozenset(request.state_steps)
        self._recovery_step = 0  # a step of the execution, set from another thread
        self._states_due = 0  # the states that were requested and have not arrived
        self._on_state = on_state
        self._on_digests = on_digests
        self._slot_bytes = -(-max(self._nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        layout = BatchLayout(
            members=tuple(_layout(member, plan.batch) for member in plan.batch.members),
            global_rows=plan.global_rows,
            local_rows=plan.local_rows,
            micro_batches=plan.micro_batches,
            slot_bytes=self._slot_bytes,
            num_slots=BATCH_SLOTS,
        )
        self._ring = SharedMemory.create(self._slot_bytes * BATCH_SLOTS)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        first = self._request_states(1, 1 + self._worker)
        process.load(layout, self._ring.fileno(), first, done_steps=self._done_steps, input_states=request.input_states)

    def keep_state(self, step: int) -> None:
        """Requests the loader's state after one more step, unless its batch is already requested. From any thread."""
        self._recovery_step = step

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        """Sends the batches of this worker's steps. Returns the seconds by what they were spent on."""
        if schedule.done_steps != self._done_steps:
            raise ValueError(f"{schedule.done_steps} steps are done, but {self._done_steps} when the plan was loaded")
        steps = steps_of_worker(self._worker, self._num_workers, schedule.num_steps)
        self._begin = time.perf_counter()
        try:
            for number, step in enumerate(steps[:BATCH_SLOTS]):
                self._request_batch(number, step)
            for number, step in enumerate(steps):
                self._supply(number % BATCH_SLOTS, step, steps[number - BATCH_SLOTS] if number >= BATCH_SLOTS else 0)
            self.progress.waits = True
            while self._states_due:
                self._receive_state(*self._process.wait_state(self._stop))
            self.progress.waits = False
            if steps:
                # The ring must last until the wafer has read its last batch.
                self._hub.wait_acked(self._link, steps[-1])
        finally:
            self.progress.end_trace()
        return self.progress.seconds()

    def _supply(self, slot: int, step: int, holder: int) -> None:
        """Sends the batch of a step. holder: the step whose batch takes the slot until it is acknowledged; 0: none."""
        progress, now = self.progress, time.perf_counter
        begin = now()
        if holder:
            self._hub.wait_acked(self._link, holder)
            self._request_batch(slot, step)
        requested = now()
        progress.waits = True
        try:
            first = self._process.wait_filled(slot, self._stop, self._receive_state)
        except JobFailure as error:
            error.step = step + self._done_steps  # other workers have the steps since this one's last
            raise
        if first.digests or first.whole.values:
            self._on_digests(first)
        progress.waits = False
        filled = now()
        self._hub.send(self._link, self._group, step, Slice(self._ring, slot * self._slot_bytes, self._nbytes))
        sent = now()
        progress.wait += requested - begin
        progress.send += sent - filled
        step += self._done_steps
        progress.step, progress.total = step, sent - self._begin
        recorder = progress.recorder
        if recorder is not None:
            recorder.add("wait", "batch taken", step, begin, requested)
            recorder.add("input", "batch", step, requested, filled)
            recorder.add("send", "batch", step, filled, sent, group=self._group)
            if step + self._num_workers >= recorder.end:
                progress.end_trace()

    def _request_batch(self, slot: int, step: int) -> None:
        state_steps = self._request_states(step, step + self._num_workers)
        recovery_step, first = self._recovery_step, step + self._done_steps
        if recovery_step in state_steps or not first <= recovery_step < first + self._num_workers:
            recovery_step = 0
        self._states_due += recovery_step > 0
        self._process.request_batch(slot, state_steps, recovery_step)

    def _request_states(self, first: int, end: int) -> list[int]:
        """Counts the states due after steps `first` to `end` - 1 of the epoch; returns their steps in the execution."""
        steps = range(self._done_steps + first, self._done_steps + end)
        state_steps = [step for step in steps if step in self._state_steps]
        self._states_due += len(state_steps)
        return state_steps

    def _receive_state(self, step: int, state: bytes) -> None:
        self._states_due -= 1
        self._on_state(step, state)

    def interrupt(self) -> None:
        """Makes the waits of `run` for the input_fn raise Stopped. From any thread."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Ends the input_fn's process, and frees the ring."""
        self._process.close()
        self._ring.close()
        os.close(self._stop)


def _layout(member: plan_pb2.GroupMember, group: plan_pb2.Group) -> TensorLayout:
    """Returns the layout of a member. Raises JobFailure if it lies outside its group."""
    if member.offset + tensor_bytes(member.type) > group.nbytes:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"value {member.value} lies outside group {group.id}")
    name = plan_pb2.ElementType.Name(member.type.element_type)
    dtype = name.removeprefix("ELEMENT_TYPE_").lower()
    return TensorLayout(dtype=dtype, shape=tuple(member.type.shape), offset=member.offset)


# --- The job ----------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class WorkerJob(RoleJob):
    """A job on an input worker. It keeps the requests of prepared loaders, so that each epoch can make its loader."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._prepared: dict[str, node_pb2.PrepareInput] = {}
        self._waiting: dict[str, InputProcess] = {}  # the processes that no program owns yet, by loader

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        """Starts the input_fn's process, which makes the loader while the step is compiled."""
        for folder in map(os.fsdecode, request.mount_dirs):
            if not os.path.isdir(folder):
                raise JobFailure(
                    node_pb2.Failure.KIND_USER,
                    f"{self.context.node} on {socket.gethostname()} has no folder {folder!r} (mount_dirs of the "
                    "ClusterConfig): make it there, or mount it where this worker runs, or take it out of mount_dirs",
                )
        self._end_waiting(request.loader)
        self._prepared[request.loader] = request
        self._waiting[request.loader] = InputProcess(request, self._output_failed)

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> WorkerProgram:
        prepared = self._prepared.get(request.loader)
        if prepared is None:
            raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"no input was prepared as {request.loader!r}")
        if request.loader not in self._waiting:
            self._waiting[request.loader] = InputProcess(prepared, self._output_failed)
        ((_, link),) = ((key, link) for key, link in links.items() if key[0] == node_pb2.LINK_PURPOSE_WAFER)

        def emit(step: int, state: bytes) -> None:
            response = node_pb2.InputState(epoch=request.epoch, step=step, state=state)
            self.context.emit(node_pb2.AttachResponse(input_state=response))

        def emit_digests(first: FirstBatch) -> None:
            whole = node_pb2.BatchDigest(layout=first.whole.layout, values=first.whole.values)
            response = node_pb2.InputDigests(epoch=request.epoch, digests=first.digests, first_batch=whole)
            self.context.emit(node_pb2.AttachResponse(input_digests=response))

        process = self._waiting[request.loader]
        program = WorkerProgram(request, prepared, process, hub, link, emit, emit_digests)
        del self._waiting[request.loader]  # The program closes the process from now on.
        if request.done_steps:
            how = "resumed there" if request.input_states else "made again, and skips the batches before"
            logger.info("The input begins after step %d: its loader is %s", request.done_steps, how)
        return program

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        if isinstance(self._program, WorkerProgram) and request.epoch == self._epoch:
            self._program.keep_state(request.step)

    def close(self) -> None:
        super().close()
        for loader in list(self._waiting):
            self._end_waiting(loader)

    def _output_failed(self, error: Exception) -> None:
        report_failure(self.context, error)

    def _end_waiting(self, loader: str) -> None:
        process = self._waiting.pop(loader, None)
        if process is not None:
            process.close()

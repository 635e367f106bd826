"""The outputs of an execution: received from nodes, kept until they are sent to the client, and sampled for curves."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from waferbox.host.event_loop import from_any_thread
from waferbox.host.threads import GuardedThread
from waferbox.links.elements import tensor_bytes, torch_dtype
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import HELD_STEPS, Link, LinkLost
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

# --- Samples of outputs that are single numbers, for loss curves ------------------------------------------------------

INTERVAL_SECONDS = 0.25
MAX_NAMES = 32

OnScalars = Callable[[int, Mapping[str, float]], None]  # step, values by name


class ScalarSampler:
    """Samples the outputs that are single numbers, about every INTERVAL_SECONDS. Used by one thread."""

    def __init__(self, outputs: Sequence[plan_pb2.Output], num_steps: int, on_scalars: OnScalars) -> None:
        """num_steps: the last step, which is always sampled, like the first."""
        single = [(index, output) for index, output in enumerate(outputs) if math.prod(output.type.shape) == 1]
        self._scalars = [(i, o.name, torch_dtype(o.type.element_type)) for i, o in single[:MAX_NAMES]]
        self._num_steps = num_steps
        self._on_scalars = on_scalars
        self._due = 0.0

    def sample(self, step: int, tensors: Sequence[bytes]) -> None:
        """Samples a step if it is due.

        Args:
            step: of the execution.
            tensors: the bytes of all outputs, in the plan's order.
        """
        now = time.monotonic()
        if not self._scalars or (now < self._due and step != self._num_steps):
            return
        self._due = now + INTERVAL_SECONDS
        import torch  # not at the top: a coordinator starts faster without, and imports it with the compiler

        self._on_scalars(
            step,
            {
                name: float(torch.frombuffer(bytearray(tensors[index]), dtype=dtype)[0].item())
                for index, name, dtype in self._scalars
            },
        )


# --- Outputs on their way to the client -------------------------------------------------------------------------------

# Outputs are sent to the client in batches; none waits longer than BATCH_SECONDS for others.
BATCH_STEPS = 8
BATCH_SECONDS = 0.01


class OutputDecoder:
    """Extracts one output from the frame of its group. Stateless, hence thread-safe."""

    def __init__(self, output: plan_pb2.Output, groups: Mapping[int, plan_pb2.Group], num_parts: int) -> None:
        """Finds the output in its group.

        Args:
            output: the output.
            groups: the groups of the plan, by id.
            num_parts: number of micro-batches of all wafers.

        Raises:
            ValueError: the output and its group do not fit together.
        """
        group = groups.get(output.group)
        offset = next((m.offset for m in group.members if m.value == output.value), None) if group is not None else None
        if group is None or offset is None:
            raise ValueError(f"the output {output.name!r} is in no group of the plan")
        self._nbytes = tensor_bytes(output.type)
        self._begin = offset
        self._parts: tuple[int, int] | None = None
        if output.gathered and num_parts > 1:
            shape = output.type.shape
            outer = math.prod(shape[: output.dim]) * output.outer
            if output.outer < 1 or outer < 1 or self._nbytes % (outer * num_parts):
                raise ValueError(
                    f"the output {output.name!r} of shape {list(shape)} cannot be divided into {num_parts} parts"
                )
            self._parts = (num_parts, outer)

    @property
    def end(self) -> int:
        """End of the output's bytes in the frame."""
        return self._begin + self._nbytes

    def read(self, frame: memoryview) -> bytes:
        """Returns the tensor's bytes."""
        data = frame[self._begin : self.end]
        if self._parts is None:
            return bytes(data)
        # The frame has (part, outer, rest); the tensor has (outer, part, rest).
        return numpy.frombuffer(data, numpy.uint8).reshape(*self._parts, -1).swapaxes(0, 1).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCallbacks:
    """The callbacks of an epoch for its outputs, called in the event loop.

    Attributes:
        on_outputs: called with the seconds after which outputs can be taken.
        on_failure: called with the exception that ended the links.
        on_scalars: called with the step and the values, by name, of sampled outputs.
    """

    on_outputs: Callable[[float], None]
    on_failure: Callable[[Exception], None]
    on_scalars: OnScalars


class Results:
    """The outputs of an epoch: a thread receives them and keeps them until they are taken. Used in one event loop.

    On the links steps count from the start of the epoch, in the methods from the start of the execution.

    Senders are acknowledged only the steps that the client has consumed, and send at most run_ahead_steps steps with
    outputs beyond these. This bounds the memory of outputs.
    """

    def __init__(
        self,
        plan: plan_pb2.Plan,
        schedule: StepSchedule,
        links: Mapping[int, Link],
        callbacks: OutputCallbacks,
    ) -> None:
        """Takes over the links; start begins to receive.

        Args:
            plan: of the step.
            schedule: of the epoch.
            links: by purpose; close closes them.
            callbacks: of the epoch.
        """
        groups = {group.id: group for group in plan.coordinator.groups}
        self._groups = [(group.id, links[_source(plan, group)]) for group in plan.coordinator.groups]
        num_parts = plan.num_csx * (plan.pipeline if plan.HasField("pipeline") else plan.wafer).micro_batches
        self._outputs = [(o.group, OutputDecoder(o, groups, num_parts)) for o in plan.coordinator.outputs]
        for group_id, reader in self._outputs:
            if reader.end > groups[group_id].nbytes:
                raise ValueError(
                    f"an output of group {group_id} ends at byte {reader.end} of {groups[group_id].nbytes}"
                )
        self._sizes = {group.id: group.nbytes for group in plan.coordinator.groups}
        self._last_step = schedule.global_step(schedule.num_steps)
        self._sampler = ScalarSampler(plan.coordinator.outputs, self._last_step, from_any_thread(callbacks.on_scalars))
        self._schedule = schedule
        self._links = [link for link in links.values() if any(link is used for _, used in self._groups)]
        self._on_outputs = from_any_thread(callbacks.on_outputs)
        self._on_failure = from_any_thread(callbacks.on_failure)
        self._hub = Hub()
        for link in links.values():
            sizes = {group: self._sizes[group] for group, source in self._groups if source is link}
            link.expect(sizes, steps=max(HELD_STEPS, 2 * schedule.run_ahead_steps))
            self._hub.add(link)
        self._all_links = tuple(links.values())
        self._changed = threading.Condition()
        self._waiting: deque[coordinator_pb2.StepOutputs] = deque()
        self._oldest = 0.0  # when the first of them was received
        self._began = 0.0
        self._first_step = schedule.global_step(next(iter(schedule.output_steps()), 0))
        self._consumed = 0  # step of the execution
        self._stopped = False
        self._thread = GuardedThread(self._run, name="results", on_defect=self._on_failure)

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def take(self) -> coordinator_pb2.OutputBatch | None:
        """Returns all received outputs, in order; None if there are none, or while they are too few for a batch."""
        with self._changed:
            waiting = self._waiting
            if not waiting or not (self._is_batch() or time.monotonic() - self._oldest >= BATCH_SECONDS):
                return None
            batch = coordinator_pb2.OutputBatch(steps=waiting)
            waiting.clear()
        return batch

    def _is_batch(self) -> bool:
        """Whether outputs should be sent at once: with the first or last step, a full batch, or the bound reached."""
        waiting = self._waiting
        first = waiting[0].step == self._first_step
        full = len(waiting) >= min(BATCH_STEPS, self._schedule.run_ahead_steps)
        return first or full or waiting[-1].step == self._last_step

    def consumed(self, step: int) -> None:
        """Notes that the client has consumed all steps up to this one."""
        with self._changed:
            self._consumed = max(self._consumed, step)
            self._changed.notify_all()

    async def close(self) -> None:
        """Ends the thread and closes the links."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._hub.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._hub.close()
        for link in self._all_links:
            link.close()

    def _run(self) -> None:
        try:
            received: deque[int] = deque()  # steps that the client has not consumed, as far as the senders know
            for step in self._schedule.output_steps():
                self._acknowledge(received)
                self._receive(step)
                received.append(step)
        except Stopped:
            return
        except LinkLost as error:
            self._on_failure(error)

    def _acknowledge(self, received: "deque[int]") -> None:
        """Acknowledges consumed steps to the senders; waits for the client when the bound is reached."""
        with self._changed:
            while (
                not self._stopped
                and len(received) >= self._schedule.run_ahead_steps
                and self._schedule.global_step(received[0]) > self._consumed
            ):
                self._changed.wait()
            if self._stopped:
                raise Stopped
            consumed = self._consumed - self._schedule.done_steps
        last = 0
        while received and received[0] <= consumed:
            last = received.popleft()
        if last:
            for link in self._links:
                link.ack(last)

    def _receive(self, step: int) -> None:
        frames = {group: self._hub.receive(link, group, step).view for group, link in self._groups}
        tensors = [reader.read(frames[group]) for group, reader in self._outputs]
        step = self._schedule.global_step(step)
        with self._changed:
            now = time.monotonic()
            if is_first := not self._waiting:
                self._oldest = now
            self._waiting.append(coordinator_pb2.StepOutputs(step=step, tensors=tensors, seconds=now - self._began))
            is_batch = self._is_batch()
        if is_batch or is_first:
            self._on_outputs(0.0 if is_batch else BATCH_SECONDS)
        self._sampler.sample(step, tensors)


def _source(plan: plan_pb2.Plan, group: plan_pb2.Group) -> "node_pb2.LinkPurpose.ValueType":
    """The purpose of the link on which a group is received."""
    if group.kind == plan_pb2.GROUP_KIND_OUTPUT and not plan.HasField("pipeline"):
        return node_pb2.LINK_PURPOSE_SHARD
    return node_pb2.LINK_PURPOSE_SWARMX if plan.num_csx > 1 else node_pb2.LINK_PURPOSE_WAFER

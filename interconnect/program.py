"""What the step programs of a wafer and of MemoryX have in common: a list of calls, made once and run in each step.

A plan names values by number; a program keeps them in a list, by a dense index given out at load. Nothing is looked up
by name, and no message is read, while a step runs.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from interconnect.groups import ReceivedGroup, SendBuffers
from interconnect.hub import Hub
from interconnect.link import Link, Window
from interconnect.schedule import StepSchedule, is_for_coordinator_only, worker_of_step
from wsc.v1 import plan_pb2

Action = Callable[[int], None]  # one instruction, called with the step


class Values:
    """The values of a step, by dense index."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # a tensor, or None while there is no such value
        self._indices: dict[int, int] = {}

    def index(self, value: int) -> int:
        """The index of a value of the plan; given out when it is asked for first."""
        index = self._indices.get(value)
        if index is None:
            index = self._indices[value] = len(self.tensors)
            self.tensors.append(None)
        return index

    def indices(self, values: Iterable[int]) -> list[int]:
        return [self.index(value) for value in values]


class Clock:
    """Where the time of an execution goes, in seconds."""

    def __init__(self) -> None:
        self.wait = 0.0
        self.send = 0.0

    def spent(self, total: float) -> dict[str, float]:
        return {"total": total, "wait": self.wait, "send": self.send, "compute": total - self.wait - self.send}


class Program:
    """Actions in order; some of them only in steps in which outputs leave."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.values = Values()
        self.clock = Clock()
        self._actions: list[tuple[Action, bool]] = []

    def add(self, action: Action, *, only_outputs: bool = False) -> None:
        self._actions.append((action, only_outputs))

    def run(self, schedule: StepSchedule, after_step: Action | None = None) -> Mapping[str, float]:
        """All steps; returns the seconds by what they were spent on. after_step is called after each step."""
        all_actions = [action for action, _ in self._actions]
        quiet_actions = [action for action, only_outputs in self._actions if not only_outputs]
        begin = time.perf_counter()
        with torch.inference_mode():
            for step in range(1, schedule.num_steps + 1):
                for action in all_actions if schedule.outputs_leave(step) else quiet_actions:
                    action(step)
                if after_step is not None:
                    after_step(step)
        return self.clock.spent(time.perf_counter() - begin)

    def add_receive(self, group: plan_pb2.Group, links: Sequence[Link]) -> None:
        """Wait for a group and take its members. Of several links (workers) each supplies its steps."""
        hub, clock, tensors = self.hub, self.clock, self.values.tensors
        received = ReceivedGroup(group)
        indices = self.values.indices(member.value for member in received.members)
        group_id, num_links, views_of = group.id, len(links), received.tensors
        now = time.perf_counter

        def receive(step: int) -> None:
            link = links[worker_of_step(step, num_links)]
            begin = now()
            message = hub.receive(link, group_id, step)
            clock.wait += now() - begin
            for index, tensor in zip(indices, views_of(message), strict=True):
                tensors[index] = tensor

        self.add(receive)

    def close(self) -> None:
        """Drop the calls, and with them every tensor that they hold."""
        self._actions.clear()
        self.values.tensors.clear()

    def add_send(
        self,
        group: plan_pb2.Group,
        links: Sequence[Link],
        buffers: SendBuffers,
        *,
        as_bytes: bool,
        window: Window | None = None,
    ) -> None:
        """Send a group, complete with the values that must be copied into it, over each of the links."""
        hub, clock, tensors = self.hub, self.clock, self.values.tensors
        group_id, payload = group.id, buffers.slice(group.id)
        copies = [(self.values.index(value), tensor) for value, tensor in buffers.copies(group.id)]
        now = time.perf_counter

        def send(step: int) -> None:
            for index, tensor in copies:
                tensor.copy_(tensors[index])
            begin = now()
            for link in links:
                hub.send(link, group_id, step, payload, window=window, as_bytes=as_bytes)
            clock.send += now() - begin

        self.add(send, only_outputs=is_for_coordinator_only(group))

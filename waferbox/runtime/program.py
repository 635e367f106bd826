"""The base of the step programs of wafers and MemoryX: a list of calls, made once and run in each step.

A plan names values by number; a program keeps them in a list, by a dense index that is assigned at load. While a step
runs, nothing is looked up by name, and no message is parsed.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from waferbox.links.hub import Hub
from waferbox.links.link import Link, Window
from waferbox.runtime.groups import ReceivedGroup, SendBuffers
from waferbox.runtime.layer_times import INTERVAL_SECONDS, LayerTimes
from waferbox.runtime.progress import Progress, Recorder, group_label
from waferbox.runtime.schedule import StepSchedule, is_for_coordinator_only, worker_of_step
from wsc.v1 import plan_pb2

Action = Callable[[int], None]  # one instruction, called with the step


class Values:
    """The values of a step, by dense index. Used by one thread."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # a tensor, or None while there is no such value
        self._indices: dict[int, int] = {}

    def index(self, value: int) -> int:
        """Returns the index of a value of the plan, which the first call assigns."""
        index = self._indices.get(value)
        if index is None:
            index = self._indices[value] = len(self.tensors)
            self.tensors.append(None)
        return index

    def indices(self, values: Iterable[int]) -> list[int]:
        return [self.index(value) for value in values]


class Entry(NamedTuple):
    """An action, and what a timeline shows of it.

    layer: the layer that it belongs to, as in the plan; empty: none.
    group: the id of the group that is sent or received; None: there is none.
    sources: the nodes that the group comes from, each for its steps; empty: it is not received.
    """

    action: Action
    what: str
    detail: str
    only_outputs: bool = False
    region: str = ""
    layer: str = ""
    group: int | None = None
    sources: Sequence[str] = ()


def run_recorded(
    entries: Iterable[Entry], recorder: Recorder, schedule: StepSchedule, step: int, repetition: int = 0
) -> None:
    """Runs one step, or a repetition of its loop, and records each action as a span."""
    now, outputs_leave, recorded_step = time.perf_counter, schedule.outputs_leave(step), schedule.global_step(step)
    for action, what, detail, only_outputs, region, _, group, sources in entries:
        if only_outputs and not outputs_leave:
            continue
        begin = now()
        action(step)
        end = now()
        text = f"{detail}, repetition {repetition + 1}" if repetition else detail
        source = sources[worker_of_step(step, len(sources))] if sources else ""
        recorder.add(what, text, recorded_step, begin, end, region=region, group=group, source=source)


class Program:
    """The actions of a step, in order; some run only in steps in which outputs leave. Used by one thread.

    The actions between `begin_loop` and `end_loop` run several times in a step; `repetition` is the number of the
    present time, from 0. It is 0 for all other actions.
    """

    def __init__(self, hub: Hub, work: str, *, measures_layers: bool = False) -> None:
        """Makes a program without actions.

        Args:
            hub: of the links.
            work: the name of the kernels' time, such as "compute".
            measures_layers: whether the time of a step by layer is measured, in a step of half a second.
        """
        self.hub = hub
        self.values = Values()
        self.progress = Progress(work)
        self._work = work
        self._measures_layers = measures_layers
        self.repetition = 0
        self._outputs_leave: Callable[[int], bool] = lambda step: True
        self._entries: list[Entry] = []
        self._body = range(0)
        self._times = 1

    def begin_loop(self, times: int) -> None:
        """Begins the loop: actions that are added from now on run so many times in a step."""
        self._times = times
        self._body = range(len(self._entries), len(self._entries))

    def end_loop(self) -> None:
        """Ends the loop."""
        self._body = range(self._body.start, len(self._entries))

    @property
    def _stretches(self) -> list[tuple[list[Entry], int]]:
        """The entries before the loop, in it, and behind it, with the times that they run in a step."""
        begin, end = self._body.start, self._body.stop
        return [(self._entries[:begin], 1), (self._entries[begin:end], self._times), (self._entries[end:], 1)]

    def add(self, action: Action, detail: str, *, what: str = "", layer: str = "") -> None:
        """Adds an action. detail: for a timeline. what: "wait" or "send"; empty: the program's work. layer: if any."""
        self.add_entry(Entry(action, what or self._work, detail, layer=layer))

    def add_entry(self, entry: Entry) -> None:
        self._entries.append(entry)

    def run(self, schedule: StepSchedule, after_step: Action | None = None) -> Mapping[str, float]:
        """Runs all steps, with `after_step` after each. Returns the seconds by what they were spent on."""
        self._outputs_leave = schedule.outputs_leave
        stretches = self._stretches
        all_actions = [([entry.action for entry in entries], times) for entries, times in stretches]
        quiet_actions = [
            ([entry.action for entry in entries if not entry.only_outputs], times) for entries, times in stretches
        ]
        progress, now = self.progress, time.perf_counter
        layers = progress.layers = LayerTimes(self._entries) if self._measures_layers else None
        begin = now()
        measured = begin  # the begin of the last step that was measured; the first step fills caches, and is not
        is_due = False
        try:
            with torch.inference_mode():
                for step in range(1, schedule.num_steps + 1):
                    recorder = progress.recorder
                    if recorder is None and layers is not None and is_due:
                        measured = now()
                        self._run_measured(layers, schedule, step)
                    elif recorder is None:
                        for actions, times in all_actions if schedule.outputs_leave(step) else quiet_actions:
                            for repetition in range(times):
                                self.repetition = repetition
                                for action in actions:
                                    action(step)
                    else:
                        for entries, times in stretches:
                            for repetition in range(times):
                                self.repetition = repetition
                                run_recorded(entries, recorder, schedule, step, repetition)
                        if schedule.global_step(step) + 1 >= recorder.end:
                            progress.end_trace()
                    if after_step is not None:
                        after_step(step)
                    ended = now()
                    progress.step, progress.total = schedule.global_step(step), ended - begin
                    is_due = ended - measured >= INTERVAL_SECONDS or step == 1
        finally:
            progress.end_trace()
        return progress.seconds()

    def _run_measured(self, layers: LayerTimes, schedule: StepSchedule, step: int) -> None:
        """Runs a step, and measures the time of each layer."""
        first, outputs_leave = 0, schedule.outputs_leave(step)
        for entries, times in self._stretches:
            for repetition in range(times):
                self.repetition = repetition
                layers.run(entries, first, outputs_leave=outputs_leave, step=step)
            first += len(entries)
        layers.end_step()

    def add_receive(
        self, group: plan_pb2.Group, links: Sequence[Link], *, keep: bool = False, is_written: bool = False
    ) -> None:
        """Adds an action that waits for a group and takes its members.

        Args:
            group: the group.
            links: the links that it comes over, each for its steps, as from several workers.
            keep: whether the sender may write the group again before its members are read for the last time.
            is_written: whether a later action writes to the members.
        """
        hub, progress, tensors = self.hub, self.progress, self.values.tensors
        received = ReceivedGroup(group, keep=keep, is_written=is_written)
        indices = self.values.indices(member.value for member in received.members)
        group_id, num_links, views_of = group.id, len(links), received.tensors
        now = time.perf_counter

        def receive(step: int) -> None:
            link = links[worker_of_step(step, num_links)]
            begin = now()
            message = hub.receive(link, group_id, step)
            progress.wait += now() - begin
            for index, tensor in zip(indices, views_of(message), strict=True):
                tensors[index] = tensor

        sources = [link.name for link in links]
        entry = Entry(receive, "wait", group_label(group), layer=group.layer, group=group_id, sources=sources)
        self.add_entry(entry)

    def close(self) -> None:
        """Drops the actions, and with them every tensor that they hold."""
        self._entries.clear()
        self.values.tensors.clear()

    def add_send(
        self,
        group: plan_pb2.Group,
        links: Sequence[Link],
        buffers: SendBuffers,
        *,
        as_bytes: bool = False,
        window: Window | None = None,
        coordinator: Link | None = None,
    ) -> None:
        """Adds an action that completes a group with copied values, and sends it over each of the links.

        Args:
            group: the group.
            links: where to, in each step.
            buffers: those of the role.
            as_bytes: as of `Hub.send`.
            window: likewise.
            coordinator: where to in steps in which outputs leave: as bytes, within the window "ack".
        """
        hub, progress, tensors = self.hub, self.progress, self.values.tensors
        group_id, payload = group.id, buffers.slice(group.id)
        copies = [(self.values.index(value), tensor) for value, tensor in buffers.copies(group.id)]
        now = time.perf_counter

        def send(step: int) -> None:
            for index, tensor in copies:
                tensor.copy_(tensors[index])
            begin = now()
            for link in links:
                hub.send(link, group_id, step, payload, window=window, as_bytes=as_bytes)
            if coordinator is not None and self._outputs_leave(step):
                hub.send(coordinator, group_id, step, payload, window="ack", as_bytes=True)
            progress.send += now() - begin

        only_outputs = is_for_coordinator_only(group)
        self.add_entry(Entry(send, "send", group_label(group), only_outputs, layer=group.layer, group=group_id))

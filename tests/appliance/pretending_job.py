"""A job of a role that runs no kernels: it counts steps and sends the outputs that are due."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from waferbox.host.threads import CancellationToken
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import Link
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.node_job import JobContext, LinkKey
from waferbox.runtime.progress import Progress
from waferbox.runtime.role_job import RoleJob, StepProgram
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import (
    node_pb2,
    observation_pb2,
    plan_pb2,
)


@dataclass
class Behaviour:
    """The behaviour of the nodes, by the node's name in the job."""

    prepared: dict[str, node_pb2.PrepareInput] = field(default_factory=dict)
    loads: dict[str, list[node_pb2.Load]] = field(default_factory=dict)
    links: dict[str, set[LinkKey]] = field(default_factory=dict)
    on_step: dict[str, Callable[[JobContext, int], object]] = field(default_factory=dict)
    may_begin: dict[str, Callable[[int], object]] = field(default_factory=dict)  # a step, which waits until it may
    on_attach: dict[str, Callable[[], None]] = field(default_factory=dict)
    on_stop: dict[str, Callable[[], None]] = field(default_factory=dict)
    on_load: dict[str, Callable[[JobContext], None]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)  # the steps whose loss SwarmX, or a single wafer, has sent
    released: dict[str, list[int]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    starts: dict[str, list[node_pb2.Start]] = field(default_factory=dict)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    keeps_points: bool = True
    gives_up: Callable[[int], bool] = lambda number: False  # which recovery points: their disk is full
    told_to_trace: set[str] = field(default_factory=set)


class PretendingProgram:
    """A program that sends the outputs of its role, and keeps no state."""

    def __init__(
        self, context: JobContext, behaviour: Behaviour, load: node_pb2.Load, hub: Hub, link: Link | None
    ) -> None:
        self.context = context
        self.behaviour = behaviour
        self.load = load
        self.hub = hub
        self.link = link
        self.memory = SharedMemory.create(4096)
        self.progress = Progress("compute")
        self.done_steps = 0
        self.due: node_pb2.KeepRecoveryPoint | None = None
        self.last_recovery_point = 0
        self._interrupted = threading.Event()

    def keep(self, number: int) -> None:
        if number and self.context.node.startswith("memoryx"):
            kept = node_pb2.RecoveryPointKept(recovery_point=number, given_up=self.behaviour.gives_up(number))
            self.context.emit(node_pb2.AttachResponse(recovery_point_kept=kept))

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        self.done_steps = schedule.done_steps
        for step in range(1, schedule.num_steps + 1):
            self._wait_until_it_may_begin(schedule.global_step(step))
            hook = self.behaviour.on_step.get(self.context.node)
            if hook is not None:
                hook(self.context, schedule.global_step(step))
            if self._interrupted.is_set():
                raise Stopped
            begin = time.perf_counter()
            if self.link is not None and schedule.outputs_leave(step):
                self.link.limit_ahead(schedule.run_ahead_steps)
                self.send(step)
            if self.context.node.startswith("memoryx") and schedule.keeps_snapshot(step):
                snapshot = node_pb2.Snapshot(step=schedule.global_step(step))
                self.context.emit(node_pb2.AttachResponse(snapshot=snapshot))
            if self.due is not None and self.due.step <= schedule.global_step(step):
                due, self.due = self.due, None
                if due.step == schedule.global_step(step):
                    self.keep(due.recovery_point)
            self.progress.step, self.progress.total = schedule.global_step(step), step * 0.001
            if self.progress.recorder is not None:
                self.progress.recorder.add("compute", "layer", step, begin, time.perf_counter())
                if step + 1 >= self.progress.recorder.end:
                    self.progress.end_trace()
        self.progress.end_trace()
        self.keep(self.last_recovery_point)
        return {"compute": 1.5}

    def _wait_until_it_may_begin(self, step: int) -> None:
        may_begin = self.behaviour.may_begin.get(self.context.node)
        while may_begin is not None and not may_begin(step):
            if self._interrupted.wait(0.005):
                raise Stopped

    def send(self, step: int) -> None:
        if self.load.HasField("memoryx"):
            self.fill(self.load.memoryx.groups[0], step)
            return
        for group in self.load.swarmx.groups or self.load.wafer.groups:
            self.fill(group, step)
        self.behaviour.sent.append(self.done_steps + step)

    def fill(self, group: plan_pb2.Group, step: int) -> None:
        count = group.nbytes // 4
        values = torch.arange(count, dtype=torch.float32) + self.done_steps + step
        view = self.memory.tensor(torch.float32, (count,), 0)
        view.copy_(values)
        assert self.link is not None
        self.hub.send(self.link, group.id, step, Slice(self.memory, 0, group.nbytes), window="ack", as_bytes=True)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self.behaviour.stopped.append(self.context.node)
        self.memory.close()


class PretendingJob(RoleJob):
    def __init__(self, context: JobContext, behaviour: Behaviour) -> None:
        super().__init__(context)
        self.behaviour = behaviour
        behaviour.on_attach.get(context.node, lambda: None)()

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> StepProgram:
        hook = self.behaviour.on_load.get(self.context.node)
        if hook is not None:
            hook(self.context)
        self.behaviour.loads.setdefault(self.context.node, []).append(request)
        self.behaviour.links[self.context.node] = set(links)
        link = links.get((node_pb2.LINK_PURPOSE_COORDINATOR, 0))
        sends = bool(request.swarmx.groups or request.wafer.groups or request.memoryx.groups)
        return PretendingProgram(self.context, self.behaviour, request, hub, link if sends else None)

    def missing_states(self) -> list[str]:
        load = self.behaviour.loads[self.context.node][-1]
        return [state.name for state in load.memoryx.states] if load.epoch == 1 else []

    def load(self, request: node_pb2.Load, cancellation: CancellationToken) -> Sequence[str]:
        if request.links:
            return super().load(request, cancellation)
        self._drop()
        self._complete(request)
        self.behaviour.loads.setdefault(self.context.node, []).append(request)
        return ()

    def start(self, request: node_pb2.Start) -> None:
        program, keeps_points = self._program, self.behaviour.keeps_points
        self.behaviour.starts.setdefault(self.context.node, []).append(request)  # from now on the test may change it
        if isinstance(program, PretendingProgram) and keeps_points:
            program.last_recovery_point = request.last_recovery_point
            program.keep(request.recovery_point)
        super().start(request)

    def stop(self, epoch: int) -> None:
        self.behaviour.on_stop.get(self.context.node, lambda: None)()
        super().stop(epoch)

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        if isinstance(self._program, PretendingProgram) and self.behaviour.keeps_points:
            self._program.due = request

    def drop_recovery_points(self, before: int) -> None:
        self.behaviour.dropped.setdefault(self.context.node, []).append(before)

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        self.behaviour.prepared[self.context.node] = request

    def trace(self, request: observation_pb2.Trace) -> None:
        super().trace(request)
        self.behaviour.told_to_trace.add(self.context.node)

    def release_snapshot(self, step: int) -> None:
        self.behaviour.released.setdefault(self.context.node, []).append(step)


def plan_with_groups(plan: plan_pb2.Plan) -> plan_pb2.Plan:
    """The senders' parts of make_plan."""
    wafers = plan.swarmx if plan.num_csx > 1 else plan.wafer
    for group in plan.coordinator.groups:
        sender = plan.memoryx[0] if group.kind == plan_pb2.GROUP_KIND_OUTPUT else wafers
        sender.groups.add().CopyFrom(group)
    return plan

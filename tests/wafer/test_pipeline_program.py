"""A wafer's program of layer pipelined mode, with its links held by the test."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from link_pairs import End, connect, listening
from recovery_cases import recovery_points_of

from wafer.kernels import WaferKernels
from wafer.pipeline_program import PipelineProgram
from wafer.regions import RegionOrder
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.links.hub import Stopped
from waferbox.links.link import LinkLost
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.progress import Recorder
from waferbox.runtime.schedule import StepSchedule
from waferbox.states.kernels import StateKernels
from waferbox.states.layout import StateRequirements
from waferbox.states.point_shares import PointShares
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, observation_pb2, plan_pb2

SIZE, MICRO_BATCHES = 1000, 3
SECONDS = 30.0
BATCH, OUTPUT = 1, 2  # groups
A, B = 10, 11  # states; parts of micro-batch k: + k
X, Y, DY = 20, 30, 40
DA, DB, LOSS, NEW_A, NEW_B = 50, 51, 52, 53, 54

VECTOR = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[SIZE])
SCALAR = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32)
STEPS = StepSchedule(num_steps=6, activation_steps=2, checkpoint_steps=frozenset({4}), run_ahead_steps=8)


def first_kernel() -> str:
    """(x, a) -> x * a"""
    b = GraphBuilder()
    x, a = (b.argument(tensor_type((SIZE,), torch.float32)) for _ in range(2))
    return print_module(b.finish([(b.op("cirh.Mul", [x, a])[0], None)]))


def last_kernel() -> str:
    """(y, b) -> (sum(y * b), b, y): the loss, and its gradients with respect to y and b"""
    builder = GraphBuilder()
    y, b = (builder.argument(tensor_type((SIZE,), torch.float32)) for _ in range(2))
    loss = builder.op("cirh.Mul", [y, b])[0]
    loss = builder.op("cirh.Reduce", [loss], {"dimensions": [0], "keep_dims": [], "reduce_kind": "ADD"})[0]
    return print_module(builder.finish([(loss, None), (b, None), (y, None)]))


def update_kernel() -> str:
    """(w, dw) -> w - 0.1 * dw"""
    b = GraphBuilder()
    weight, gradient = (b.argument(tensor_type((SIZE,), torch.float32)) for _ in range(2))
    step = b.op("cirh.Mul", [gradient, b.splat(0.1, (SIZE,), torch.float32)])[0]
    return print_module(b.finish([(b.op("cirh.Sub", [weight, step])[0], None)]))


def run(kernel: int, inputs: list[int], outputs: list[int], **more: Any) -> plan_pb2.Instruction:
    return plan_pb2.Instruction(run=plan_pb2.Run(kernel=kernel, inputs=inputs, outputs=outputs, **more))


def pipeline() -> plan_pb2.PipelinePlan:
    """loss = sum(x * a * b), with a in one region and b in the other, and a step of SGD for both."""
    parts = range(MICRO_BATCHES)
    members = [plan_pb2.GroupMember(value=X + k, type=VECTOR, offset=4096 * k) for k in parts]
    batch = plan_pb2.Group(id=BATCH, kind=plan_pb2.GROUP_KIND_BATCH, members=members, nbytes=4096 * MICRO_BATCHES)
    loss = plan_pb2.Group(
        id=OUTPUT, kind=plan_pb2.GROUP_KIND_OUTPUT, members=[plan_pb2.GroupMember(value=LOSS, type=SCALAR)], nbytes=4
    )
    first = [
        plan_pb2.Instruction(receive=plan_pb2.Receive(group=BATCH)),
        *(run(1, [X + k, A], [Y + k], layer="a", micro_batch=k) for k in parts),
        *(run(1, [X + k, DY + k], [DA], layer="a backward", micro_batch=k, drops=[DY + k]) for k in parts),
        run(3, [A, DA], [NEW_A], commits=[A]),
    ]
    last = [
        *(run(2, [Y + k, B], [LOSS, DY + k, DB], layer="b", micro_batch=k, drops=[Y + k]) for k in parts),
        run(3, [B, DB], [NEW_B], commits=[B]),
        plan_pb2.Instruction(send=plan_pb2.Send(group=OUTPUT)),
    ]
    total = plan_pb2.REDUCTION_SUM
    return plan_pb2.PipelinePlan(
        states=[plan_pb2.StateSlot(value=A, name="a", type=VECTOR), plan_pb2.StateSlot(value=B, name="b", type=VECTOR)],
        groups=[batch, loss],
        kernels=[
            plan_pb2.Kernel(id=number, cirh=text)
            for number, text in enumerate((first_kernel(), last_kernel(), update_kernel()), 1)
        ],
        regions=[
            plan_pb2.Region(name="first", width=1, height=1, instructions=first),
            plan_pb2.Region(name="last", x=1, width=1, height=1, instructions=last),
        ],
        joined=[
            plan_pb2.JoinedValue(value=DA, type=VECTOR, reduction=total),
            plan_pb2.JoinedValue(value=DB, type=VECTOR, reduction=total),
            plan_pb2.JoinedValue(value=LOSS, type=SCALAR, reduction=total),
        ],
        micro_batches=MICRO_BATCHES,
    )


@dataclass
class Rig:
    """A program, the far ends of its links, and its states."""

    program: PipelineProgram
    worker: End
    coordinator: End
    store: StateStore
    snapshots: Snapshots
    recovery_points: PointShares
    hub_end: End
    told: list[int] = field(default_factory=list)  # steps of snapshots
    batches: SharedMemory = field(default_factory=lambda: SharedMemory.create(4096 * MICRO_BATCHES))

    def give(self, step: int, done_steps: int = 0) -> torch.Tensor:
        """A step's batch, which the program has from then on."""
        x = torch.randn(MICRO_BATCHES, SIZE, generator=torch.Generator().manual_seed(step + done_steps))
        for k in range(MICRO_BATCHES):
            self.batches.tensor(torch.float32, (SIZE,), 4096 * k).copy_(x[k])
        payload = Slice(self.batches, 0, self.batches.nbytes)
        self.worker.hub.send(self.worker.link, BATCH, step, payload, as_bytes=True)
        return x

    def loss(self, step: int) -> float:
        message = self.coordinator.hub.receive(self.coordinator.link, OUTPUT, step)
        return message.tensor(torch.float32, (), 0).item()


class MakeRig(Protocol):
    """Makes a rig, of `pipeline` unless it is given another plan."""

    def __call__(self, num_threads: int, plan: plan_pb2.PipelinePlan | None = None) -> Rig: ...


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    monkeypatch.setenv("WAFERBOX_CACHE", str(tmp_path))
    rigs: list[Rig] = []
    with listening() as listener:

        def make(num_threads: int, plan: plan_pb2.PipelinePlan | None = None) -> Rig:
            plan = plan or pipeline()
            store = StateStore()
            store.load(StateRequirements(slots=plan.states))
            for scale, name in enumerate("ab", 1):
                store.tensor(name).copy_(torch.linspace(-scale, scale, SIZE))
            store.mark_written("ab")
            told: list[int] = []
            snapshots = Snapshots(store, told.append)
            (worker, near), (coordinator, other) = connect(listener, "socket"), connect(listener, "socket")
            hub = near.hub
            other.hub.close()
            hub.add(other.link)
            links = {
                (node_pb2.LINK_PURPOSE_WORKER, 0): near.link,
                (node_pb2.LINK_PURPOSE_COORDINATOR, 0): other.link,
            }
            recovery_points = recovery_points_of(store)
            program = PipelineProgram(
                plan,
                WaferKernels(),
                StateKernels(),
                store,
                snapshots,
                recovery_points,
                hub,
                links,
                num_threads=num_threads,
            )
            rigs.append(Rig(program, worker, coordinator, store, snapshots, recovery_points, near, told))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.program.close()
            rig.snapshots.reset()
            rig.recovery_points.close()
            rig.store.close()
            for end in (rig.worker, rig.coordinator, rig.hub_end):
                end.close()
            rig.batches.close()


class Running:
    """The program's steps in a thread."""

    def __init__(self, rig: Rig, schedule: StepSchedule = STEPS) -> None:
        self.error: BaseException | None = None
        self._rig = rig
        self._schedule = schedule
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._rig.program.run(self._schedule)
        except (Stopped, LinkLost, RuntimeError, ValueError) as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def threads_of_regions() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("regions-")]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_losses_and_weights_are_those_of_the_whole_batch(make_rig: MakeRig, num_threads: int) -> None:
    """The gradient of y is b itself, which is updated before the other region reads that."""
    rig = make_rig(num_threads)
    spans: list[node_pb2.AttachResponse] = []
    trace = observation_pb2.Trace(epoch=1, first_step=2, num_steps=1)
    rig.program.progress.recorder = Recorder("wafer-0", trace, spans.append)
    running = Running(rig)
    a, b = (torch.linspace(-scale, scale, SIZE) for scale in (1, 2))
    for step in range(1, STEPS.num_steps + 1):
        x = rig.give(step)
        expected = float((x * a * b).sum())
        a, b = a - 0.1 * (x * b).sum(0), b - 0.1 * (x * a).sum(0)
        if STEPS.outputs_leave(step):
            assert rig.loss(step) == pytest.approx(expected, rel=1e-4)
            rig.coordinator.link.ack(step)
        if step == 4:
            saved = {"a": a.clone(), "b": b.clone()}
    running.join()
    assert running.error is None
    torch.testing.assert_close(rig.store.tensor("a"), a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rig.store.tensor("b"), b, rtol=1e-5, atol=1e-5)
    assert rig.told == [4]
    with rig.snapshots.reading(4) as snapshot:  # after two more steps
        for name, value in saved.items():
            kept = torch.frombuffer(bytearray(snapshot.part(name, 0, 4 * SIZE).view), dtype=torch.float32)
            torch.testing.assert_close(kept, value, rtol=1e-5, atol=1e-5)
    rig.worker.hub.wait_acked(rig.worker.link, STEPS.num_steps)
    assert threads_of_regions() == []
    rows = {(span.region, span.detail) for response in spans for span in response.spans.spans if span.region}
    assert ("first", "a, micro-batch 2") in rows
    assert ("last", "b, micro-batch 3") in rows
    assert ("last", "b") in {(region, detail) for region, detail in rows}  # its update


def run_epoch(rig: Rig, num_steps: int, done_steps: int) -> dict[int, float]:
    """The losses that leave, by step of the execution."""
    schedule = StepSchedule(
        num_steps=num_steps - done_steps,
        activation_steps=1,
        checkpoint_steps=frozenset(),
        run_ahead_steps=8,
        done_steps=done_steps,
    )
    running, losses = Running(rig, schedule), {}
    for step in range(1, schedule.num_steps + 1):
        rig.give(step, done_steps)
        losses[schedule.global_step(step)] = rig.loss(step)
        rig.coordinator.link.ack(step)
    running.join()
    assert running.error is None
    return losses


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("done_steps", [1, 4, 6])
def test_two_epochs_are_one(make_rig: MakeRig, num_threads: int, done_steps: int) -> None:
    whole, first, rest = (make_rig(num_threads) for _ in range(3))
    expected = run_epoch(whole, 6, 0)
    losses = run_epoch(first, done_steps, 0)
    for name in "ab":
        rest.store.tensor(name).copy_(first.store.tensor(name))
    losses |= run_epoch(rest, 6, done_steps)
    assert losses == expected
    for name in "ab":
        assert torch.equal(rest.store.tensor(name), whole.store.tensor(name))


def test_what_is_told_of_an_epoch_are_steps_of_the_execution(make_rig: MakeRig) -> None:
    """Of eight steps three are done; outputs leave after every fourth."""
    schedule = StepSchedule(
        num_steps=5, activation_steps=4, checkpoint_steps=frozenset({6}), run_ahead_steps=8, done_steps=3
    )
    rig = make_rig(2)
    spans: list[node_pb2.AttachResponse] = []
    trace = observation_pb2.Trace(epoch=1, first_step=5, num_steps=2)
    rig.program.progress.recorder = Recorder("wafer-0", trace, spans.append)
    running = Running(rig, schedule)
    for step in range(1, 6):
        rig.give(step)
        if step in (1, 5):
            rig.loss(step)
    running.join()
    assert running.error is None
    assert rig.told == [6]
    assert rig.program.progress.step == 8
    assert {span.step for response in spans for span in response.spans.spans} == {5, 6}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_recovery_points_are_of_their_steps(make_rig: MakeRig, tmp_path: Path, num_threads: int) -> None:
    rig = make_rig(num_threads)
    kept: queue.Queue[node_pb2.RecoveryPointKept] = queue.Queue()
    rig.recovery_points.close()
    points = rig.program._recovery_points = recovery_points_of(rig.store, tmp_path / "job" / "wafer-0", kept.put)
    points.expect(node_pb2.Start(recovery_point=1, last_recovery_point=3))
    points.expect_after(3, 2)
    running = Running(rig)
    values = {1: [torch.linspace(-scale, scale, SIZE) for scale in (1, 2)]}
    a, b = values[1]
    for step in range(1, STEPS.num_steps + 1):
        x = rig.give(step)
        a, b = a - 0.1 * (x * b).sum(0), b - 0.1 * (x * a).sum(0)
        values |= {2: [a, b]} if step == 3 else {3: [a, b]}
        if STEPS.outputs_leave(step):
            rig.loss(step)
            rig.coordinator.link.ack(step)
        if step in (1, 3):  # a later one could take its place
            assert kept.get(timeout=SECONDS).recovery_point == (1 if step == 1 else 2)
    running.join()
    assert kept.get(timeout=SECONDS).recovery_point == 3
    for number, expected in values.items():
        assert points.load(StateRequirements(slots=pipeline().states), number) == []
        for name, value in zip("ab", expected, strict=True):
            torch.testing.assert_close(rig.store.tensor(name), value, rtol=1e-5, atol=1e-5)
    points.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_waited_for_and_never_comes_is_waited_for_until_the_end_of_the_job(
    make_rig: MakeRig, num_threads: int
) -> None:
    rig = make_rig(num_threads)
    running = Running(rig)
    rig.give(1)
    rig.worker.hub.wait_acked(rig.worker.link, 1)
    rig.hub_end.hub.stop()
    rig.program.interrupt()
    running.join()
    assert isinstance(running.error, Stopped)
    assert threads_of_regions() == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_worker_that_goes_is_named(make_rig: MakeRig, num_threads: int) -> None:
    rig = make_rig(num_threads)
    running = Running(rig)
    rig.give(1)
    rig.worker.hub.wait_acked(rig.worker.link, 1)
    rig.worker.link.close()
    running.join()
    assert isinstance(running.error, LinkLost)
    assert threads_of_regions() == []


@pytest.mark.defects
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_defect_in_a_region_ends_the_execution(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    plan = pipeline()
    del plan.regions[1].instructions[0].run.inputs[:]  # a kernel without what it reads
    rig = make_rig(num_threads, plan)
    running = Running(rig)
    rig.give(1)
    running.join()
    assert isinstance(running.error, ValueError)
    assert "0 inputs for a kernel of 2" in str(running.error)
    assert threads_of_regions() == []


def test_what_several_regions_read_is_dropped_behind_the_last_read(make_rig: MakeRig) -> None:
    plan = pipeline()
    plan.regions[0].instructions[4].run.drops.remove(DY)
    plan.regions[1].instructions.insert(3, run(1, [B, DY], [60]))  # both regions read it now
    for num_threads in (1, 2):
        rig = make_rig(num_threads, plan)
        running = Running(rig)
        for step in range(1, STEPS.num_steps + 1):
            rig.give(step)
        running.join()
        values = rig.program._program.values
        assert values.tensors[values.index(DY)] is None
        assert values.tensors[values.index(60)] is not None


def test_regions_that_wait_for_one_another_are_refused() -> None:
    plan = pipeline()
    backward = plan.regions[0].instructions.pop(4)
    plan.regions[0].instructions.insert(0, backward)
    with pytest.raises(ValueError, match="the regions wait for one another"):
        RegionOrder(plan, 2)


def test_a_value_that_is_made_twice_and_not_joined_is_refused(make_rig: MakeRig) -> None:
    plan = pipeline()
    del plan.joined[0]
    with pytest.raises(ValueError, match=rf"several Runs make the values \[{DA}\], which are not joined"):
        make_rig(1, plan)


def test_one_thread_ends_what_is_begun_first() -> None:
    """A micro-batch goes through all regions before the next one begins, as far as the lists of the regions say."""
    plan = pipeline()
    (order,) = RegionOrder(plan, 1).threads
    assert [place.region for place in order] == [0, 0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0]
    two = RegionOrder(plan, 5)
    assert [{place.region for place in places} for places in two.threads] == [{0}, {1}]

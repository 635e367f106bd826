"""A wafer's program with its links held by the test."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from appliance.compiler.wafer_schedule import arena
from wafer.kernels import WaferKernels
from wafer.wafer_program import WaferProgram
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.links.hub import Hub
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.links.socket_lane import SocketLink
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.schedule import CREDIT_GROUPS, WEIGHTS_CREDIT_BATCH, StepSchedule
from wsc.v1 import node_pb2, plan_pb2

SIZE = 10_000  # too large to travel inline
VECTOR = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[SIZE])
STEPS = StepSchedule(num_steps=6, activation_steps=3, checkpoint_steps=frozenset(), run_ahead_steps=8)


def group(group_id: int, kind: "plan_pb2.GroupKind.ValueType", *values: int, **fields: Any) -> plan_pb2.Group:
    members = [
        plan_pb2.GroupMember(value=value, type=VECTOR, offset=number * SIZE * 4) for number, value in enumerate(values)
    ]
    return plan_pb2.Group(id=group_id, kind=kind, members=members, nbytes=SIZE * 4 * len(values), **fields)


def double_kernel() -> str:
    builder = GraphBuilder()
    x, w = (builder.argument(tensor_type((SIZE,), torch.float32)) for _ in range(2))
    return print_module(builder.finish([(builder.op("cirh.Mul", [x, w])[0], None), (x, None)]))


@pytest.fixture
def ends() -> Iterator[tuple[SocketLink, SocketLink]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = SocketLink("swarmx-0", ours), SocketLink("wafer-0", theirs)
    yield links
    for link in links:
        link.close()


def test_value_that_several_groups_send_and_outputs_of_some_steps(ends: tuple[SocketLink, SocketLink]) -> None:
    parent, far = ends
    sum_of = plan_pb2.REDUCTION_SUM
    kind = plan_pb2.GROUP_KIND_REDUCTION
    plan = plan_pb2.WaferPlan(
        groups=[
            group(1, plan_pb2.GROUP_KIND_WEIGHTS, 1, 2),
            group(2, plan_pb2.GROUP_KIND_WEIGHTS, source_shard=1),  # a step token
            group(3, kind, 3, 4, reduction=sum_of, shards=[0, 1]),
            group(4, kind, 3, reduction=sum_of, to_coordinator=True),
            group(5, kind, 2, reduction=sum_of, shards=[1]),  # something that was received
        ],
        kernels=[plan_pb2.Kernel(id=1, cirh=double_kernel())],
        instructions=[
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=1)),
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=2)),
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, inputs=[1, 2], outputs=[3, 4], drops=[1])),
            plan_pb2.Instruction(send=plan_pb2.Send(group=3)),
            plan_pb2.Instruction(send=plan_pb2.Send(group=4)),
            plan_pb2.Instruction(send=plan_pb2.Send(group=5)),
        ],
    )
    hub, far_hub = Hub(), Hub()
    hub.add(parent)
    far_hub.add(far)
    program = WaferProgram(plan, 0, WaferKernels(), hub, {(node_pb2.LINK_PURPOSE_PARENT, 0): parent})
    seconds: list[float] = []
    thread = threading.Thread(target=lambda: seconds.extend(program.run(STEPS).values()))
    thread.start()
    weights = SharedMemory.create(SIZE * 8)
    values = weights.tensor(torch.float32, (2, SIZE), 0)
    seen = []
    for step in range(1, 7):
        values[0] = step
        values[1] = 10.0 * step
        far_hub.send(far, 1, step, Slice(weights, 0, SIZE * 8))
        far_hub.send(far, 2, step, Slice(weights, 0, 0))
        both = far_hub.receive(far, 3, step).tensor(torch.float32, (2, SIZE), 0)
        assert (both[0] == 10.0 * step * step).all()
        assert (both[1] == step).all()
        if step % 3 == 0:
            message = far_hub.receive(far, 4, step)
            assert message.payload is not None  # bytes: the client may be far behind
            assert (message.tensor(torch.float32, (SIZE,), 0) == 10.0 * step * step).all()
        assert (far_hub.receive(far, 5, step).tensor(torch.float32, (SIZE,), 0) == 10.0 * step).all()
        seen.append(step)
    thread.join(20)
    assert len(seconds) == 4
    credits = sorted((m.group - CREDIT_GROUPS, m.step) for m in far.inbox)
    assert credits == [(0, WEIGHTS_CREDIT_BATCH), (1, WEIGHTS_CREDIT_BATCH)]
    program.close()
    for each in (hub, far_hub):
        each.close()


@pytest.mark.parametrize(
    ("micro_batches", "reduction", "expected"),
    [
        (1, plan_pb2.REDUCTION_SUM, [6]),
        (3, plan_pb2.REDUCTION_SUM, [60]),
        (3, plan_pb2.REDUCTION_MAX, [22]),
        (3, plan_pb2.REDUCTION_MIN, [18]),
        (3, plan_pb2.REDUCTION_GATHER, [18, 20, 22]),
    ],
)
def test_micro_batches_know_their_numbers_and_join_what_they_make(
    ends: tuple[SocketLink, SocketLink],
    micro_batches: int,
    reduction: "plan_pb2.Reduction.ValueType",
    expected: list[int],
) -> None:
    """Each makes twice the number of its part of the batch, on wafer 3."""
    builder = GraphBuilder()
    number = builder.argument(tensor_type((1,), torch.int64))
    kernel = print_module(builder.finish([(builder.op("cirh.Add", [number, number])[0], None)]))
    type = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT64, shape=[1])
    gathered = reduction == plan_pb2.REDUCTION_GATHER
    made = range(20, 20 + micro_batches) if gathered else [20]
    sent = plan_pb2.Group(
        id=1,
        kind=plan_pb2.GROUP_KIND_REDUCTION,
        members=[plan_pb2.GroupMember(value=value, type=type, offset=8 * i) for i, value in enumerate(made)],
        nbytes=8 * len(made),
        reduction=reduction,
        shards=[] if gathered else [0],
        to_coordinator=gathered,
    )
    runs = [
        plan_pb2.Run(kernel=1, inputs=[9 + k], outputs=[made[k] if gathered else 20], micro_batch=k)
        for k in range(micro_batches)
    ]
    plan = plan_pb2.WaferPlan(
        groups=[sent],
        kernels=[plan_pb2.Kernel(id=1, cirh=kernel)],
        instructions=[
            *(plan_pb2.Instruction(run=run) for run in runs),
            plan_pb2.Instruction(send=plan_pb2.Send(group=1)),
        ],
        number_values=range(9, 9 + micro_batches),
        micro_batches=micro_batches,
    )
    parent, far = ends
    hub, far_hub = Hub(), Hub()
    hub.add(parent)
    far_hub.add(far)
    program = WaferProgram(plan, 3, WaferKernels(), hub, {(node_pb2.LINK_PURPOSE_PARENT, 0): parent})
    program.run(StepSchedule(num_steps=2, activation_steps=1, checkpoint_steps=frozenset(), run_ahead_steps=8))
    for step in (1, 2):
        assert far_hub.receive(far, 1, step).tensor(torch.int64, (len(made),), 0).tolist() == expected
    program.close()
    for each in (hub, far_hub):
        each.close()


def test_a_wafer_whose_gradients_are_not_taken_waits(
    ends: tuple[SocketLink, SocketLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arena has room for two of the six gradients of a step: it goes no further until one is released."""
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    builder = GraphBuilder()
    x = builder.argument(tensor_type((SIZE,), torch.float32))
    plan = plan_pb2.WaferPlan(
        groups=[group(1, plan_pb2.GROUP_KIND_WEIGHTS, 1)],
        kernels=[plan_pb2.Kernel(id=1, cirh=print_module(builder.finish([(builder.op("cirh.Add", [x, x])[0], None)])))],
        instructions=[plan_pb2.Instruction(receive=plan_pb2.Receive(group=1))],
    )
    gradients = range(2, 8)
    for number in gradients:
        plan.groups.append(
            group(number, plan_pb2.GROUP_KIND_REDUCTION, number, reduction=plan_pb2.REDUCTION_SUM, shards=[0])
        )
        plan.instructions.add().run.CopyFrom(plan_pb2.Run(kernel=1, inputs=[number - 1], outputs=[number]))
        plan.instructions.add().send.group = number
    # What a later kernel reads is copied to where it is sent from.
    for number in gradients:
        plan.instructions[2 * number - 3].run.inputs[0] = 1
    plan.arena.CopyFrom(arena.lay_out_arena(plan))
    assert plan.arena.credited
    assert plan.arena.nbytes < 3 * SIZE * 4
    parent, far = ends
    hub, far_hub = Hub(), Hub()
    hub.add(parent)
    far_hub.add(far)
    program = WaferProgram(plan, 0, WaferKernels(), hub, {(node_pb2.LINK_PURPOSE_PARENT, 0): parent})
    schedule = StepSchedule(num_steps=3, activation_steps=1, checkpoint_steps=frozenset(), run_ahead_steps=8)
    thread = threading.Thread(target=lambda: program.run(schedule))
    thread.start()
    weights = SharedMemory.create(SIZE * 4)
    nothing = Slice(weights, 0, 0)
    counts = ArenaCounts(plan.arena)
    taken = told = 0
    for step in (1, 2, 3):
        weights.tensor(torch.float32, (SIZE,), 0).fill_(step)
        far_hub.send(far, 1, step, Slice(weights, 0, SIZE * 4))
        for number in gradients:
            tensor = far_hub.receive(far, number, step).tensor(torch.float32, (SIZE,), 0)
            before = len(far.inbox)
            thread.join(0.02)
            while far.poll():
                pass
            assert len([m for m in far.inbox if m.group < CREDIT_GROUPS]) <= 1, "it went on without room"
            assert before <= len(far.inbox)
            assert (tensor == 2.0 * step).all()
            taken += 1
            for count in counts.awaited_between(told, taken):
                far_hub.send(far, RELEASED_GROUP, count, nothing)
            told = taken
    thread.join(20)
    assert not thread.is_alive()
    program.close()
    for each in (hub, far_hub):
        each.close()


def test_member_outside_its_group_is_refused(ends: tuple[SocketLink, SocketLink]) -> None:
    bad = group(1, plan_pb2.GROUP_KIND_WEIGHTS, 1)
    bad.nbytes = 64
    plan = plan_pb2.WaferPlan(groups=[bad], instructions=[plan_pb2.Instruction(receive=plan_pb2.Receive(group=1))])
    with pytest.raises(ValueError, match="which has 64 bytes"):
        WaferProgram(plan, 0, WaferKernels(), Hub(), {(node_pb2.LINK_PURPOSE_PARENT, 0): ends[0]})


# --- A single wafer ---------------------------------------------------------------------------------------------------

SHARD, COORDINATOR = node_pb2.LINK_PURPOSE_SHARD, node_pb2.LINK_PURPOSE_COORDINATOR


class Far:
    """The far ends of a single wafer's links to two shards and the coordinator."""

    def __init__(self) -> None:
        self.hub, self.near_hub = Hub(), Hub()
        self.near: dict[tuple[node_pb2.LinkPurpose.ValueType, int], SocketLink] = {}
        self.links: list[SocketLink] = []
        for key, name in (((SHARD, 0), "memoryx-0"), ((SHARD, 1), "memoryx-1"), ((COORDINATOR, 0), "coordinator")):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.near[key] = SocketLink(name, ours)
            self.links.append(SocketLink("wafer-0", theirs))
            self.near_hub.add(self.near[key])
            self.hub.add(self.links[-1])
        self.shards, self.coordinator = self.links[:2], self.links[2]

    def values_of(self, link: SocketLink, number: int, step: int) -> torch.Tensor:
        return self.hub.receive(link, number, step).tensor(torch.float32, (SIZE,), 0)

    def has_sent(self, link: SocketLink, number: int) -> bool:
        """Whether the wafer has sent a group that was not received."""
        while link.poll():
            pass
        return any(message.group == number for message in link.inbox)

    def close(self) -> None:
        for link in (*self.near.values(), *self.links):
            link.close()
        self.hub.close()
        self.near_hub.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    made.close()


def test_a_single_wafer_sends_to_the_shards_and_the_coordinator_itself(far: Far) -> None:
    """What it reduces for itself it has already; outputs are bounded by what the coordinator has acknowledged."""
    kind, sum_of = plan_pb2.GROUP_KIND_REDUCTION, plan_pb2.REDUCTION_SUM
    plan = plan_pb2.WaferPlan(
        groups=[
            group(1, plan_pb2.GROUP_KIND_WEIGHTS, 1, 2),
            group(2, plan_pb2.GROUP_KIND_WEIGHTS, source_shard=1),  # a step token
            group(3, kind, 3, reduction=sum_of, to_wafers=True, shards=[1]),
            group(4, kind, 5, reduction=sum_of, shards=[0, 1], to_coordinator=True),
            group(5, kind, 6, reduction=sum_of, to_coordinator=True),
            group(6, kind, 4, reduction=sum_of, shards=[1]),
        ],
        kernels=[plan_pb2.Kernel(id=1, cirh=double_kernel())],
        instructions=[
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=1)),
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=2)),
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, inputs=[1, 2], outputs=[3, 4])),
            plan_pb2.Instruction(send=plan_pb2.Send(group=3)),
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=3)),
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, inputs=[3, 2], outputs=[5, 6])),
            *(plan_pb2.Instruction(send=plan_pb2.Send(group=number)) for number in (4, 5, 6)),
        ],
    )
    program = WaferProgram(plan, 0, WaferKernels(), far.near_hub, far.near)
    schedule = StepSchedule(num_steps=6, activation_steps=3, checkpoint_steps=frozenset(), run_ahead_steps=1)
    thread = threading.Thread(target=lambda: program.run(schedule))
    thread.start()
    weights = SharedMemory.create(SIZE * 8)
    values = weights.tensor(torch.float32, (2, SIZE), 0)
    zero, one = far.shards
    for step in range(1, 7):
        values[0], values[1] = step, 10.0
        far.hub.send(zero, 1, step, Slice(weights, 0, SIZE * 8))
        far.hub.send(one, 2, step, Slice(weights, 0, 0))
        assert (far.values_of(one, 3, step) == 10.0 * step).all()
        for shard in far.shards:
            assert (far.values_of(shard, 4, step) == 100.0 * step).all()
        if step == 6:
            thread.join(0.1)
            assert not far.has_sent(one, 6)
            far.coordinator.ack(3)
        assert (far.values_of(one, 6, step) == step).all()
        if step % 3 == 0:
            for number, factor in ((4, 100.0), (5, 10.0)):
                message = far.hub.receive(far.coordinator, number, step)
                assert message.payload is not None
                assert (message.tensor(torch.float32, (SIZE,), 0) == factor * step).all()
    thread.join(20)
    assert not thread.is_alive()
    assert not any(link.inbox for link in far.links)
    assert [shard.granted for shard in far.shards] == [WEIGHTS_CREDIT_BATCH] * 2
    program.close()


def test_a_single_wafer_waits_for_both_shards_to_release_gradients(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arena has room for two of the six gradients of a step, which go to the shards in turns."""
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    builder = GraphBuilder()
    x = builder.argument(tensor_type((SIZE,), torch.float32))
    plan = plan_pb2.WaferPlan(
        groups=[group(1, plan_pb2.GROUP_KIND_WEIGHTS, 1)],
        kernels=[plan_pb2.Kernel(id=1, cirh=print_module(builder.finish([(builder.op("cirh.Add", [x, x])[0], None)])))],
        instructions=[plan_pb2.Instruction(receive=plan_pb2.Receive(group=1))],
    )
    gradients = range(2, 8)
    for number in gradients:
        kind, sum_of = plan_pb2.GROUP_KIND_REDUCTION, plan_pb2.REDUCTION_SUM
        plan.groups.append(group(number, kind, number, reduction=sum_of, shards=[number % 2]))
        plan.instructions.add().run.CopyFrom(plan_pb2.Run(kernel=1, inputs=[1], outputs=[number]))
        plan.instructions.add().send.group = number
    plan.arena.CopyFrom(arena.lay_out_arena(plan))
    assert plan.arena.nbytes < 3 * SIZE * 4
    counts = ArenaCounts(plan.arena)
    released = [counts.released_counts([number for number in gradients if number % 2 == shard]) for shard in (0, 1)]
    program = WaferProgram(plan, 0, WaferKernels(), far.near_hub, far.near)
    schedule = StepSchedule(num_steps=3, activation_steps=1, checkpoint_steps=frozenset(), run_ahead_steps=8)
    thread = threading.Thread(target=lambda: program.run(schedule))
    thread.start()
    weights = SharedMemory.create(SIZE * 4)
    for step in (1, 2, 3):
        weights.tensor(torch.float32, (SIZE,), 0).fill_(step)
        far.hub.send(far.shards[0], 1, step, Slice(weights, 0, SIZE * 4))
        for number in gradients:
            shard = number % 2
            tensor = far.values_of(far.shards[shard], number, step)
            thread.join(0.02)
            assert not far.has_sent(far.shards[shard], number + 2), "it went on without room"
            assert (tensor == 2.0 * step).all()
            if count := released[shard][number][0]:
                far.hub.send(far.shards[shard], RELEASED_GROUP, counts.count(count, step), Slice(weights, 0, 0))
    thread.join(20)
    assert not thread.is_alive()
    program.close()

"""A shard's program with its links held by the test: exchange, commits, computed weights, the credit window."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from recovery_cases import recovery_points_of

from memoryx import paging
from memoryx.memoryx_program import MemoryXProgram, requirements_of
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.links.hub import Hub
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.links.socket_lane import SocketLink
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.schedule import WEIGHTS_WINDOW, StepSchedule
from waferbox.states.kernels import StateKernels
from waferbox.states.state_memory import TRANSFER_BYTES, StateSettings
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, plan_pb2

SIZE = 12_000
VECTOR = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[SIZE])
SCALAR = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32)
NEAR = (node_pb2.LINK_PURPOSE_SWARMX, 0)
OTHER_SHARD = (node_pb2.LINK_PURPOSE_SHARD, 1)


class Rig:
    """A program in a thread, and the far ends of its links."""

    def __init__(
        self, plan: plan_pb2.MemoryXPlan, num_steps: int, settings: StateSettings | None = None, **states: torch.Tensor
    ) -> None:
        self.store = StateStore(settings)
        self.store.load(requirements_of(plan))
        for name, tensor in states.items():
            self.store.tensor(name).copy_(tensor)
        self.store.mark_written(states)
        self.hub, self.far_hub = Hub(), Hub()
        self.far: dict[tuple[int, int], SocketLink] = {}
        self.near: dict[tuple[node_pb2.LinkPurpose.ValueType, int], SocketLink] = {}
        for key, name in ((NEAR, "swarmx-0"), (OTHER_SHARD, "memoryx-1")):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.near[key], self.far[key] = SocketLink(name, ours), SocketLink("memoryx-0", theirs)
            self.hub.add(self.near[key])
            self.far_hub.add(self.far[key])
        snapshots = Snapshots(self.store, lambda step: None)
        self.recovery_points = recovery_points_of(self.store)
        self.program = MemoryXProgram(
            plan, StateKernels(), self.store, snapshots, self.recovery_points, self.hub, self.near
        )
        schedule = StepSchedule(
            num_steps=num_steps, activation_steps=1, checkpoint_steps=frozenset(), run_ahead_steps=1
        )
        self.thread = threading.Thread(target=self.program.run, args=(schedule,))
        self.thread.start()

    def close(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.program.close()
        for link in (*self.near.values(), *self.far.values()):
            link.close()
        self.hub.close()
        self.far_hub.close()
        self.recovery_points.close()
        self.store.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def scale_kernel() -> str:
    """(w, s) -> (w * s, s + 1)"""
    builder = GraphBuilder()
    vector = tensor_type((SIZE,), torch.float32)
    weight = builder.argument(vector)
    scalar = builder.argument(tensor_type((), torch.float32))
    wide = builder.op("cirh.BroadcastInDim", [scalar], {"broadcast_dimensions": []}, types=[vector])[0]
    following = builder.op("cirh.Add", [scalar, builder.splat(1.0, (), torch.float32)])[0]
    return print_module(builder.finish([(builder.op("cirh.Mul", [weight, wide])[0], None), (following, None)]))


def test_computed_weights_exchange_and_commits(stack: ExitStack) -> None:
    plan = plan_pb2.MemoryXPlan(
        states=[
            plan_pb2.StateSlot(value=1, name="w", type=VECTOR),
            plan_pb2.StateSlot(value=2, name="s", type=SCALAR),
            plan_pb2.StateSlot(value=3, name="v", type=VECTOR),
        ],
        groups=[
            plan_pb2.Group(  # a state and a value that is computed, in one piece
                id=1,
                kind=plan_pb2.GROUP_KIND_WEIGHTS,
                members=[
                    plan_pb2.GroupMember(value=1, type=VECTOR),
                    plan_pb2.GroupMember(value=4, type=VECTOR, offset=SIZE * 4),
                ],
                nbytes=SIZE * 8,
            ),
            plan_pb2.Group(
                id=2,
                kind=plan_pb2.GROUP_KIND_EXCHANGE,
                members=[plan_pb2.GroupMember(value=4, type=VECTOR)],
                nbytes=SIZE * 4,
                shards=[1],
            ),
            plan_pb2.Group(
                id=3,
                kind=plan_pb2.GROUP_KIND_EXCHANGE,
                members=[plan_pb2.GroupMember(value=6, type=VECTOR)],
                nbytes=SIZE * 4,
                source_shard=1,
                shards=[0],
            ),
        ],
        kernels=[plan_pb2.Kernel(id=1, cirh=scale_kernel())],
        instructions=[
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, inputs=[1, 2], outputs=[4, 5], commits=[0, 2])),
            plan_pb2.Instruction(send=plan_pb2.Send(group=1)),
            plan_pb2.Instruction(send=plan_pb2.Send(group=2)),
            plan_pb2.Instruction(receive=plan_pb2.Receive(group=3)),
            plan_pb2.Instruction(commit=plan_pb2.Commit(value=6, state=3)),
            plan_pb2.Instruction(commit=plan_pb2.Commit(value=6, state=1)),
        ],
    )
    rig = Rig(plan, 3, w=torch.ones(SIZE), s=torch.tensor(2.0), v=torch.zeros(SIZE))
    stack.callback(rig.close)
    weight = 1.0
    theirs = SharedMemory.create(SIZE * 4)
    for step in (1, 2, 3):
        both = rig.far_hub.receive(rig.far[NEAR], 1, step).tensor(torch.float32, (2, SIZE), 0)
        assert (both[0] == weight).all()
        assert (both[1] == weight * (step + 1)).all()
        message = rig.far_hub.receive(rig.far[OTHER_SHARD], 2, step)
        assert message.payload is not None
        assert (message.tensor(torch.float32, (SIZE,), 0) == weight * (step + 1)).all()
        weight = 10.0 * step
        theirs.tensor(torch.float32, (SIZE,), 0).fill_(weight)
        rig.far_hub.send(rig.far[OTHER_SHARD], 3, step, Slice(theirs, 0, SIZE * 4), as_bytes=True)
    rig.thread.join(20)
    assert (rig.store.tensor("v") == 30).all()
    assert (rig.store.tensor("w") == 30).all()
    assert rig.store.tensor("s") == 5


def test_weights_are_sent_no_further_than_the_window(stack: ExitStack) -> None:
    plan = plan_pb2.MemoryXPlan(
        states=[plan_pb2.StateSlot(value=1, name="w", type=VECTOR)],
        groups=[
            plan_pb2.Group(
                id=1,
                kind=plan_pb2.GROUP_KIND_WEIGHTS,
                members=[plan_pb2.GroupMember(value=1, type=VECTOR)],
                nbytes=SIZE * 4,
            )
        ],
        instructions=[plan_pb2.Instruction(send=plan_pb2.Send(group=1))],
    )
    steps = WEIGHTS_WINDOW + 3
    rig = Rig(plan, steps, w=torch.ones(SIZE))
    stack.callback(rig.close)
    far = rig.far[NEAR]
    for step in range(1, WEIGHTS_WINDOW + 1):
        rig.far_hub.receive(far, 1, step)
    rig.thread.join(0.2)
    assert rig.thread.is_alive()
    assert not far.poll()
    far.grant(3)
    for step in range(WEIGHTS_WINDOW + 1, steps + 1):
        rig.far_hub.receive(far, 1, step)


def test_a_plan_requires_its_states_in_the_order_of_its_instructions() -> None:
    """Groups without a state, and groups that are not sent, have no place among the states."""
    groups = [
        plan_pb2.Group(id=number, kind=kind, members=[plan_pb2.GroupMember(value=value, type=VECTOR)])
        for number, (kind, value) in enumerate(
            [
                (plan_pb2.GROUP_KIND_WEIGHTS, 1),
                (plan_pb2.GROUP_KIND_WEIGHTS, 2),
                (plan_pb2.GROUP_KIND_WEIGHTS, 99),
                (plan_pb2.GROUP_KIND_WEIGHTS, 3),
                (plan_pb2.GROUP_KIND_OUTPUT, 3),
            ],
            1,
        )
    ]
    plan = plan_pb2.MemoryXPlan(
        states=[plan_pb2.StateSlot(value=number, name=name, type=VECTOR) for number, name in enumerate("abcd", 1)],
        groups=groups,
        instructions=[
            *(plan_pb2.Instruction(send=plan_pb2.Send(group=number)) for number in (2, 1, 2, 3, 5)),
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, outputs=[7, 8, 9], commits=[3, 0, 2])),
            plan_pb2.Instruction(commit=plan_pb2.Commit(value=7, state=1)),
            plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, outputs=[7], commits=[2])),
        ],
    )
    required = requirements_of(plan)
    assert list(required.slots) == list(plan.states)
    assert [group.id for group in required.weights_groups] == [2, 1]
    assert required.write_order == ["c", "b", "a"]


def large_update(elements: int) -> plan_pb2.MemoryXPlan:
    """a and b exchange their places in memory, with 1 added to a; nothing is received or sent."""
    kind = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[elements])
    builder = GraphBuilder()
    a, b = (builder.argument(tensor_type((elements,), torch.float32)) for _ in range(2))
    more = builder.op("cirh.Add", [a, builder.splat(1.0, (elements,), torch.float32)])[0]
    return plan_pb2.MemoryXPlan(
        states=[plan_pb2.StateSlot(value=1, name="a", type=kind), plan_pb2.StateSlot(value=2, name="b", type=kind)],
        kernels=[plan_pb2.Kernel(id=1, cirh=print_module(builder.finish([(b, None), (more, None)])))],
        instructions=[plan_pb2.Instruction(run=plan_pb2.Run(kernel=1, inputs=[1, 2], outputs=[3, 4], commits=[1, 2]))],
    )


def test_an_update_of_states_that_do_not_fit_is_done_in_parts(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements, steps = 2_000_000, 4
    monkeypatch.setattr(paging, "resident_bytes", lambda: 0)
    settings = StateSettings(folder=tmp_path, limit_bytes=TRANSFER_BYTES + elements)  # a quarter of a state
    values = torch.arange(elements, dtype=torch.float32) % 1000
    rig = Rig(large_update(elements), steps, settings, a=values, b=-values)
    stack.callback(rig.close)
    rig.thread.join(60)
    assert not rig.thread.is_alive()
    pages = rig.store.states.pages
    assert pages is not None
    assert pages.resident_bytes(0, rig.store.states.nbytes) <= elements * 1.2
    assert torch.equal(rig.store.tensor("a"), values + steps / 2)
    assert torch.equal(rig.store.tensor("b"), -values + steps / 2)


def test_states_that_do_not_fit_are_read_in_each_repetition_of_a_loop(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = 1_000_000
    monkeypatch.setattr(paging, "resident_bytes", lambda: 0)
    kind = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[elements])
    plan = plan_pb2.MemoryXPlan(loop=plan_pb2.Loop(begin=1, end=3, times=3))
    for number in (1, 2):
        plan.states.add(value=number, name=f"w{number}", type=kind)
        group = plan.groups.add(id=number, kind=plan_pb2.GROUP_KIND_WEIGHTS, nbytes=4 * elements)
        group.members.add(value=number, type=kind)
    for number in (1, 2, 1, 2):
        plan.instructions.add().send.group = number
    settings = StateSettings(folder=tmp_path, limit_bytes=TRANSFER_BYTES + 6 * elements)  # one weight and a half
    rig = Rig(plan, 1, settings, w1=torch.ones(elements), w2=torch.full((elements,), 2.0))
    stack.callback(rig.close)
    for number in [1, *[2, 1] * 3, 2]:
        message = rig.far_hub.receive(rig.far[NEAR], number, 1)
        assert (message.tensor(torch.float32, (elements,), 0) == number).all()
    rig.thread.join(20)
    assert not rig.thread.is_alive()
    assert not rig.far[NEAR].inbox


def test_a_limit_that_is_too_small_is_refused_with_the_least(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")  # without generated kernels, nothing is done in parts
    monkeypatch.setenv("WAFERBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paging, "resident_bytes", lambda: 100 << 20)
    settings = StateSettings(folder=tmp_path, limit_bytes=120 << 20)
    reason = r"with --memory-limit 120m .* room for 4 MB .* needs 1[67] MB at once.* must be at least (\d+)m"
    with pytest.raises(JobFailure, match=reason) as error:
        Rig(large_update(2_000_000), 1, settings)
    least = re.search(reason, str(error.value))
    assert least is not None
    values = torch.zeros(2_000_000)
    rig = Rig(
        large_update(2_000_000), 2, StateSettings(folder=tmp_path, limit_bytes=int(least[1]) << 20), a=values, b=values
    )
    stack.callback(rig.close)
    rig.thread.join(60)
    assert (rig.store.tensor("a") == 1).all()

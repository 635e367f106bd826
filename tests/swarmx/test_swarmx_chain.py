"""SwarmX nodes of three hosts in a chain: groups of several chunks, passed on and added while they arrive."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import pytest
import torch
from link_pairs import End, connect, listening

from swarmx.swarmx_program import SwarmXProgram
from waferbox.links.elements import aligned
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.schedule import CREDIT_GROUPS, WEIGHTS_CREDIT_BATCH, StepSchedule
from wsc.v1 import node_pb2, plan_pb2

COUNT = 900_001  # floats: 3.4 chunks
WEIGHTS, FIRST, SECOND, GATHERED = range(1, 5)
STEPS = WEIGHTS_CREDIT_BATCH + 1
SCHEDULE = StepSchedule(num_steps=STEPS, activation_steps=1, checkpoint_steps=frozenset(), run_ahead_steps=4)
WAFERS = (1, 2, 0)  # the root is on the host of wafer 1


def group(number: int, kind: "plan_pb2.GroupKind.ValueType", count: int, **fields: object) -> plan_pb2.Group:
    type = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[count])
    member = plan_pb2.GroupMember(value=number, type=type)
    return plan_pb2.Group(id=number, kind=kind, members=[member], nbytes=4 * count, **fields)  # type: ignore[arg-type]


def plan(window: int | None) -> plan_pb2.SwarmXPlan:
    """Weights down, two gradient groups up, and a value of all wafers that returns to them.

    window: of the groups in the arena, which has as many places and one; None: the groups are not in it.
    """
    reduction, sum_ = plan_pb2.GROUP_KIND_REDUCTION, plan_pb2.REDUCTION_SUM
    groups = [
        group(WEIGHTS, plan_pb2.GROUP_KIND_WEIGHTS, COUNT),
        group(FIRST, reduction, COUNT, reduction=sum_, shards=[0]),
        group(SECOND, reduction, COUNT, reduction=sum_, shards=[0]),
        group(GATHERED, reduction, 5, reduction=plan_pb2.REDUCTION_GATHER, to_wafers=True),
    ]
    groups[-1].nbytes *= len(WAFERS)  # a member is the part of one wafer
    arena = plan_pb2.SendArena()
    if window is not None:
        place = aligned(4 * COUNT)
        places = [
            plan_pb2.ArenaPlace(group=each, offset=number % (window + 1) * place, window=window)
            for number, each in enumerate((FIRST, SECOND))
        ]
        arena = plan_pb2.SendArena(nbytes=(window + 1) * place, places=places, credited=True)
    return plan_pb2.SwarmXPlan(groups=groups, arena=arena, times=[1] * len(groups))


def spec(
    purpose: "node_pb2.LinkPurpose.ValueType", index: int = 0, wafers: int = 1, first: int = 0
) -> node_pb2.LinkSpec:
    return node_pb2.LinkSpec(purpose=purpose, index=index, num_wafers=wafers, first_wafer=first)


class Chain:
    """Two SwarmX nodes in threads of their own, and the ends of the shard and of three wafers."""

    def __init__(self, listener: LinkListener, window: int | None) -> None:
        self.plan = plan(window)
        self._listener = listener
        self._hubs: list[Hub] = []
        self._programs: list[SwarmXProgram] = []
        self._links: list[Link] = []
        child, parent = node_pb2.LINK_PURPOSE_CHILD, node_pb2.LINK_PURPOSE_PARENT
        root_shard, self.shard = self._pair("socket")
        root_wafer, first = self._pair("socket")
        root_node, at_node = self._pair("grpc")
        at_node.hub.close()
        node_wafer, second = self._pair("socket")
        node_last, third = self._pair("grpc")  # the wafer of the last host has no node before it
        self.wafers = dict(zip(WAFERS, (first, second, third), strict=True))
        root_specs = [spec(node_pb2.LINK_PURPOSE_SHARD), spec(child, 0, first=1), spec(child, 1, wafers=2, first=1)]
        node_specs = [spec(parent), spec(child, 0, first=2), spec(child, 1, first=2)]
        self._node(root_specs, (root_shard, root_wafer, root_node))
        self._node(node_specs, (at_node.link, node_wafer, node_last))
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self._programs]

    def _pair(self, lane: str) -> tuple[Link, End]:
        ours, theirs = connect(self._listener, lane)
        ours.hub.close()
        self._links += [ours.link, theirs.link]
        return ours.link, theirs

    def _node(self, specs: Sequence[node_pb2.LinkSpec], links: Sequence[Link]) -> None:
        hub = Hub()
        for link in links:
            hub.add(link)
        by_key = {(each.purpose, each.index): link for each, link in zip(specs, links, strict=True)}
        self._hubs.append(hub)
        self._programs.append(SwarmXProgram(node_pb2.Load(swarmx=self.plan, links=specs), hub, by_key))

    def _run(self, program: SwarmXProgram) -> None:
        try:
            program.run(SCHEDULE)
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """Ends all waits."""
        for hub in (*self._hubs, self.shard.hub, *(end.hub for end in self.wafers.values())):
            hub.stop()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self.end()
        for thread in self._threads:
            thread.join(30)
        closing = [threading.Thread(target=link.close) for link in self._links]  # each waits for its peer
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for hub in (*self._hubs, self.shard.hub, *(end.hub for end in self.wafers.values())):
            hub.close()
        for program in self._programs:
            program.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


def shared(tensor: torch.Tensor) -> Slice:
    memory = SharedMemory.create(tensor.nbytes)
    memory.tensor(tensor.dtype, tuple(tensor.shape), 0).copy_(tensor)
    return Slice(memory, 0, tensor.nbytes)


def gradients(wafer: int, step: int, number: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * step + 10 * number + wafer))


def run_wafer(chain: Chain, wafer: int, received: dict[tuple[int, int], list[torch.Tensor]]) -> None:
    """Takes weights and sends gradients, as the wafer's program does."""
    end, counts = chain.wafers[wafer], ArenaCounts(chain.plan.arena)
    released = 0
    nothing = shared(torch.zeros(1))
    for step in range(1, STEPS + 1):
        weights = end.hub.receive(end.link, WEIGHTS, step)
        received[wafer, step] = [weights.tensor(torch.float32, (COUNT,), 0).clone()]
        if step % WEIGHTS_CREDIT_BATCH == 0:
            end.hub.send(end.link, CREDIT_GROUPS, step, Slice(nothing.memory, 0, 0))
        for number in (FIRST, SECOND):
            if (awaited := counts.awaited(number)) is not None:
                while released < counts.count(awaited, step):
                    released = end.hub.receive(end.link, RELEASED_GROUP).step
            end.hub.send(end.link, number, step, shared(gradients(wafer, step, number)))
        end.hub.send(end.link, GATHERED, step, shared(torch.full((5,), 10.0 * step + wafer)))
        gathered = end.hub.receive(end.link, GATHERED, step)
        received[wafer, step].append(gathered.tensor(torch.float32, (15,), 0).clone())


def run_shard(chain: Chain, weights: Mapping[int, torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    """Sends weights and takes sums, as MemoryX does; returns the sums by step and group."""
    end, counts = chain.shard, ArenaCounts(chain.plan.arena)
    released = counts.released_counts((FIRST, SECOND)) if counts.credited else {}
    nothing = shared(torch.zeros(1))
    sums = {}
    for step in range(1, STEPS + 1):
        end.hub.send(end.link, WEIGHTS, step, shared(weights[step]))
        for number in (FIRST, SECOND):
            message = end.hub.receive(end.link, number, step)
            sums[step, number] = message.tensor(torch.float32, (COUNT,), 0).clone()
            if released and (count := released[number][0]):
                end.hub.send(end.link, RELEASED_GROUP, counts.count(count, step), Slice(nothing.memory, 0, 0))
    return sums


@pytest.mark.parametrize("window", [None, 0, 1])
def test_a_chain_gives_the_wafers_all_weights_and_the_shard_all_sums(
    listener: LinkListener, window: int | None
) -> None:
    chain = Chain(listener, window)
    weights = {step: torch.randn(COUNT, generator=torch.Generator().manual_seed(step)) for step in range(1, STEPS + 1)}
    received: dict[tuple[int, int], list[torch.Tensor]] = {}
    wafers = [threading.Thread(target=run_wafer, args=(chain, wafer, received), daemon=True) for wafer in WAFERS]
    Random(0).shuffle(wafers)
    try:
        chain.start()
        for thread in wafers:
            thread.start()
        sums = run_shard(chain, weights)
        for thread in wafers:
            thread.join(30)
        chain.join()
    finally:
        chain.close()
    for step in range(1, STEPS + 1):
        for wafer in WAFERS:
            got, gathered = received[wafer, step]
            assert torch.equal(got, weights[step])
            assert gathered.tolist() == [10.0 * step + each for each in range(3) for _ in range(5)]
        for number in (FIRST, SECOND):
            one, two, three = (gradients(wafer, step, number) for wafer in WAFERS)
            assert torch.equal(sums[step, number], one + (two + three)), "each node adds its own wafer's part first"

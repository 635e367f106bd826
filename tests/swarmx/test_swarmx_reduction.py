"""Joining: each reduction, over blocks and their edges, in halves, and always in the same order."""

from collections.abc import Iterator
from random import Random
from typing import cast

import pytest
import torch

from swarmx.reduction import BLOCK_ELEMENTS, Join
from swarmx.reduction_groups import Collector, joined_bytes
from waferbox.links.link import Link, Message
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2

TYPES = {
    torch.float32: plan_pb2.ELEMENT_TYPE_FLOAT32,
    torch.float64: plan_pb2.ELEMENT_TYPE_FLOAT64,
    torch.bfloat16: plan_pb2.ELEMENT_TYPE_BFLOAT16,
    torch.float16: plan_pb2.ELEMENT_TYPE_FLOAT16,
    torch.int64: plan_pb2.ELEMENT_TYPE_INT64,
    torch.bool: plan_pb2.ELEMENT_TYPE_BOOL,
}


def frame(tensor: torch.Tensor, step: int = 1) -> Message:
    """A message of a tensor, of no link: a collector does not look at it."""
    memory = SharedMemory.create(max(1, tensor.nbytes))
    message = Message(cast("Link", None), 1, step, tensor.nbytes, memory)
    message.tensor(tensor.dtype, tuple(tensor.shape), 0).copy_(tensor)
    return message


def group(dtype: torch.dtype, count: int, reduction: "plan_pb2.Reduction.ValueType") -> plan_pb2.Group:
    type = plan_pb2.TensorType(element_type=TYPES[dtype], shape=[count])
    return plan_pb2.Group(
        id=1,
        kind=plan_pb2.GROUP_KIND_REDUCTION,
        members=[plan_pb2.GroupMember(value=1, type=type)],
        nbytes=count * dtype.itemsize,
        reduction=reduction,
    )


def join(reduction: "plan_pb2.Reduction.ValueType", parts: list[torch.Tensor]) -> torch.Tensor:
    plan = group(parts[0].dtype, parts[0].numel(), reduction)
    wafers = [part.numel() // parts[0].numel() for part in parts]
    nbytes = joined_bytes(plan, wafers)
    memory = SharedMemory.create(nbytes)
    collector = Collector(plan, wafers, memory, 0)
    for child in reversed(range(len(parts))):
        assert not collector.may_join()
        collector.add(child, frame(parts[child]))
    assert collector.may_join()
    joined = collector.join()
    assert joined.is_last
    assert (joined.step, joined.begin, joined.end, joined.result.nbytes) == (1, 0, nbytes, nbytes)
    return memory.tensor(parts[0].dtype, (nbytes // parts[0].dtype.itemsize,), 0).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("children", [1, 2, 4])
def test_sum(dtype: torch.dtype, children: int) -> None:
    count = BLOCK_ELEMENTS + 77
    parts = [(torch.randn(count) * 100).to(dtype) for _ in range(children)]
    found = join(plan_pb2.REDUCTION_SUM, parts)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_a_tree_each_node_that_adds_rounds_its_sum_once(dtype: torch.dtype) -> None:
    """Eight wafers below two nodes below the root; parts are added in wafer order, and no part is rounded again."""
    parts = [(torch.randn(1000) * 100).to(dtype) for _ in range(8)]
    leaves = [join(plan_pb2.REDUCTION_SUM, parts[begin : begin + 4]) for begin in (0, 4)]
    found = join(plan_pb2.REDUCTION_SUM, leaves)
    sums = []
    for below in (parts[:4], parts[4:]):
        wide = [part.float() for part in below]
        sums.append((wide[0] + wide[1] + wide[2] + wide[3]).to(dtype).float())
    assert torch.equal(found, (sums[0] + sums[1]).to(dtype))


def test_one_child_s_part_is_not_rounded_again() -> None:
    part = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(join(plan_pb2.REDUCTION_SUM, [part]), part)


def test_parts_that_float16_has_may_have_a_sum_that_it_has_not() -> None:
    parts = [torch.tensor([40000.0, -40000.0, 1.0], dtype=torch.float16) for _ in range(2)]
    assert join(plan_pb2.REDUCTION_SUM, parts).tolist() == [torch.inf, -torch.inf, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_max_and_min(dtype: torch.dtype) -> None:
    parts = [(torch.randn(1000) * 3).round().to(dtype) for _ in range(3)]
    stacked = torch.stack(parts).to(torch.float64)
    assert torch.equal(join(plan_pb2.REDUCTION_MAX, parts).to(torch.float64), stacked.amax(0))
    assert torch.equal(join(plan_pb2.REDUCTION_MIN, parts).to(torch.float64), stacked.amin(0))


def test_gather_keeps_wafer_order_and_takes_uneven_children() -> None:
    parts = [torch.arange(5.0), torch.arange(15.0) + 100, torch.arange(10.0) + 200]
    assert torch.equal(join(plan_pb2.REDUCTION_GATHER, parts), torch.cat(parts))
    assert part_bytes(group(torch.float32, 5, plan_pb2.REDUCTION_GATHER)) == 20


def chunks(tensor: torch.Tensor, nbytes: int) -> Iterator[Message]:
    """The chunks of a tensor's frame, as a link between hosts brings them."""
    whole = frame(tensor).view
    for begin in range(0, tensor.nbytes, nbytes):
        part = whole[begin : begin + nbytes]
        yield Message(cast("Link", None), 1, 1, len(part), payload=part, begin=begin, total=tensor.nbytes)


@pytest.mark.parametrize("reduction", [plan_pb2.REDUCTION_SUM, plan_pb2.REDUCTION_MAX, plan_pb2.REDUCTION_MIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_joined_as_they_come_to_what_whole_frames_give(
    reduction: "plan_pb2.Reduction.ValueType", dtype: torch.dtype, seed: int
) -> None:
    """Of three children one sends whole frames, as on its host; the chunks of the others come in any order of them."""
    random = Random(seed)
    count = 3 * BLOCK_ELEMENTS + 77
    parts = [(torch.randn(count) * 100).to(dtype) for _ in range(3)]
    plan = group(dtype, count, reduction)
    memory = SharedMemory.create(plan.nbytes)
    collector = Collector(plan, [1, 1, 1], memory, 0)
    size = 64 * 1024 * dtype.itemsize
    waiting = {0: [frame(parts[0])], 1: [*chunks(parts[1], size)], 2: [*chunks(parts[2], size)]}
    ends = [0]
    while waiting:
        child = random.choice(sorted(waiting))
        collector.add(child, waiting[child].pop(0))
        waiting = {child: left for child, left in waiting.items() if left}
        while collector.may_join():
            joined = collector.join()
            assert joined.begin == ends[-1]
            ends.append(joined.end)
    assert joined.is_last
    assert len(ends) == 1 + -(-plan.nbytes // size)
    assert torch.equal(memory.tensor(dtype, (count,), 0), join(reduction, parts))


@pytest.mark.parametrize("first_wafer", range(6))
def test_a_root_puts_the_parts_of_a_gather_in_the_order_of_the_wafers(first_wafer: int) -> None:
    """Its tree begins with the wafers of its own host."""
    plan = group(torch.float32, 5, plan_pb2.REDUCTION_GATHER)
    parts = [torch.arange(5.0) + 10 * wafer for wafer in range(6)]
    in_turn = torch.cat(parts[first_wafer:] + parts[:first_wafer])
    memory = SharedMemory.create(in_turn.nbytes)
    collector = Collector(plan, [1, 3, 2], memory, 0, first_wafer)
    for child, part in enumerate(in_turn.split([5, 15, 10])):
        collector.add(child, frame(part))
    assert collector.join().is_last
    assert torch.equal(memory.tensor(torch.float32, (30,), 0), torch.cat(parts))


def test_child_may_be_steps_or_repetitions_of_a_loop_ahead() -> None:
    plan = group(torch.float32, 4, plan_pb2.REDUCTION_SUM)
    memory = SharedMemory.create(16)
    collector = Collector(plan, [1, 1], memory, 0)
    steps = (1, 1, 1, 2, 3)
    for number, step in enumerate(steps):
        collector.add(0, frame(torch.full((4,), float(number)), step))
        assert not collector.may_join()
    for number, step in enumerate(steps):
        collector.add(1, frame(torch.ones(4), step))
        assert collector.join().step == step
        assert memory.tensor(torch.float32, (4,), 0)[0] == number + 1


def test_groups_are_joined_later_than_they_are_complete() -> None:
    """While their place waits for its release, a further repetition may arrive."""
    memory = SharedMemory.create(16)
    collector = Collector(group(torch.float32, 4, plan_pb2.REDUCTION_SUM), [1, 1], memory, 0)
    for number in range(3):
        collector.add(1, frame(torch.full((4,), float(number))))
        collector.add(0, frame(torch.full((4,), 10.0)))
    for number in range(3):
        collector.join()
        assert memory.tensor(torch.float32, (4,), 0)[0] == 10 + number


def test_group_that_cannot_be_reduced() -> None:
    result = Slice(SharedMemory.create(64), 0, 16)
    with pytest.raises(ValueError, match="how it is reduced"):
        Join(group(torch.float32, 4, plan_pb2.REDUCTION_UNSPECIFIED), result)
    mixed = group(torch.float32, 4, plan_pb2.REDUCTION_SUM)
    mixed.members.append(group(torch.int64, 4, plan_pb2.REDUCTION_UNSPECIFIED).members[0])
    with pytest.raises(ValueError, match="2 element types"):
        Join(mixed, result)

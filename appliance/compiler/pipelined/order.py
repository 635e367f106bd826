"""What is known of the order of a pipeline's instructions, whatever the speed of its regions.

A region runs its list in order, and an instruction waits for what it reads. So of any instruction it is known how many
of each region's have been run before it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2

# Region, and the place in its list.
At = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Order:
    """done[region][place]: how many instructions of each region have been run for sure before this one begins."""

    done: list[list[tuple[int, ...]]]

    def is_before(self, one: At, other: At) -> bool:
        """Whether one instruction has always been run when another begins."""
        return one[1] < self.done[other[0]][other[1]][one[0]]


class RegionDeadlock(ValueError):
    """Regions wait for one another."""


def find_order(plan: plan_pb2.PipelinePlan) -> Order:
    """Goes through all lists once. RegionDeadlock if a region would wait for ever."""
    groups = {group.id: group for group in plan.groups}
    count = len(plan.regions)
    missing: dict[int, int] = defaultdict(int)  # by value: instructions that are still to make it, or a part of it
    lists = [[makes_and_reads(instruction, groups) for instruction in region.instructions] for region in plan.regions]
    for makes, _ in (each for listed in lists for each in listed):
        for value in makes:
            missing[value] += 1
    there: dict[int, tuple[int, ...]] = {}  # by value: what has been run when it is complete
    done: list[list[tuple[int, ...]]] = [[] for _ in plan.regions]
    moved = True
    while moved:
        moved = False
        for number, listed in enumerate(lists):
            for place in range(len(done[number]), len(listed)):
                makes, reads = listed[place]
                if any(missing[value] for value in reads):
                    break
                clock = list(done[number][-1]) if place else [0] * count
                clock[number] = place
                for value in reads:
                    clock = list(map(max, clock, there.get(value, clock)))
                done[number].append(tuple(clock))
                clock[number] = place + 1
                for value in makes:
                    missing[value] -= 1
                    there[value] = tuple(map(max, clock, there.get(value, clock)))
                moved = True
    for region, begun in zip(plan.regions, done, strict=True):
        if len(begun) < len(region.instructions):
            raise RegionDeadlock(f"region {region.name!r} waits for what is never made")
    return Order(done)


def instructions(plan: plan_pb2.PipelinePlan) -> Iterator[tuple[At, plan_pb2.Instruction]]:
    """All instructions with their places."""
    for number, region in enumerate(plan.regions):
        for place, instruction in enumerate(region.instructions):
            yield (number, place), instruction

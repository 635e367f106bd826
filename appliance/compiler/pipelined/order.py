"""The order of a pipeline's instructions that holds at any speed of its regions.

A region runs its list in order, and an instruction waits for the values that it reads. From these two rules follows,
for each instruction, how many instructions of each region have been run before it: a vector clock.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2

# Position of an instruction: the region, and the index in its list.
At = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Order:
    """The guaranteed order of a pipeline's instructions.

    Attributes:
        done: `done[region][index]` has the number of instructions of each region that have certainly been run when this
            instruction begins.
    """

    done: list[list[tuple[int, ...]]]

    def is_before(self, one: At, other: At) -> bool:
        """Whether an instruction has always been run when another begins."""
        return one[1] < self.done[other[0]][other[1]][one[0]]


class RegionDeadlock(ValueError):
    """Raised when the regions of a plan wait for one another in a circle."""


def find_order(plan: plan_pb2.PipelinePlan) -> Order:
    """Runs through all lists once.

    Raises:
        RegionDeadlock: a region waits for ever.
    """
    groups = {group.id: group for group in plan.groups}
    count = len(plan.regions)
    missing: dict[int, int] = defaultdict(int)  # by value: instructions not yet run that make it, or a part of it
    lists = [[makes_and_reads(instruction, groups) for instruction in region.instructions] for region in plan.regions]
    for makes, _ in (each for listed in lists for each in listed):
        for value in makes:
            missing[value] += 1
    complete: dict[int, tuple[int, ...]] = {}  # by value: the clock when the value is complete
    done: list[list[tuple[int, ...]]] = [[] for _ in plan.regions]
    # In each round every region runs as far as its inputs are complete; a round without progress is the end.
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
                # The clock of an instruction is the latest of those of its inputs and of the instruction before it.
                for value in reads:
                    clock = list(map(max, clock, complete.get(value, clock)))
                done[number].append(tuple(clock))
                clock[number] = place + 1
                for value in makes:
                    missing[value] -= 1
                    complete[value] = tuple(map(max, clock, complete.get(value, clock)))
                moved = True
    for region, begun in zip(plan.regions, done, strict=True):
        if len(begun) < len(region.instructions):
            raise RegionDeadlock(f"region {region.name!r} waits for a value that is never made")
    return Order(done)


def instructions(plan: plan_pb2.PipelinePlan) -> Iterator[tuple[At, plan_pb2.Instruction]]:
    """All instructions with their positions."""
    for number, region in enumerate(plan.regions):
        for place, instruction in enumerate(region.instructions):
            yield (number, place), instruction

"""The order in which the instructions of all regions are run: fixed when a plan is loaded, one list for each thread.

An instruction comes after all that make what it reads. The lists are parts of one such order, so threads that wait for
one another never do so in a circle.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from nodes.steps.instructions import makes_and_reads
from wsc.v1 import plan_pb2


class Place(NamedTuple):
    """Where an instruction is in the plan."""

    region: int
    position: int


class RegionOrder:
    """The instructions of a plan, by thread."""

    def __init__(self, plan: plan_pb2.PipelinePlan, num_threads: int) -> None:
        """num_threads: at most so many. Raises ValueError: the regions wait for one another."""
        self.instructions = {
            Place(number, position): instruction
            for number, region in enumerate(plan.regions)
            for position, instruction in enumerate(region.instructions)
        }
        groups = {group.id: group for group in plan.groups}
        self._sides = {place: makes_and_reads(each, groups) for place, each in self.instructions.items()}
        self._thread_of_region = _divide([region.width * region.height for region in plan.regions], num_threads)
        self.needs = self._find_needs()
        self.threads = self._arrange(len(plan.regions))

    @property
    def num_threads(self) -> int:
        return len(self.threads)

    def thread_of(self, place: Place) -> int:
        """The number of the thread that runs an instruction."""
        # Links belong to the first thread: it receives for all.
        received = self.instructions[place].WhichOneof("kind") == "receive"
        return 0 if received else self._thread_of_region[place.region]

    def made_by(self, place: Place) -> Sequence[int]:
        """The values that an instruction makes."""
        return self._sides[place][0]

    def read_by(self, place: Place) -> Sequence[int]:
        """The values that an instruction reads."""
        return self._sides[place][1]

    def _find_needs(self) -> dict[Place, set[Place]]:
        """The instructions that each one comes after, those of its own region apart."""
        makers: dict[int, list[Place]] = defaultdict(list)
        for place in self.instructions:
            for value in self.made_by(place):
                makers[value].append(place)
        needs: dict[Place, set[Place]] = {}
        for place in self.instructions:
            needed = {maker for value in self.read_by(place) for maker in makers[value]}
            for value in self.made_by(place):  # what is joined is made by one after the other
                needed.update(makers[value][: makers[value].index(place)])
            needs[place] = {each for each in needed if each.region != place.region}
        return needs

    def _arrange(self, num_regions: int) -> list[list[Place]]:
        """All threads at the same pace, each with the last of its regions that can go on: what is begun is ended."""
        receives = [place for place, each in self.instructions.items() if each.HasField("receive")]
        done = set(receives)
        rest: list[deque[Place]] = [deque() for _ in range(num_regions)]
        for place in sorted(self.instructions.keys() - done):
            rest[place.region].append(place)
        threads: list[list[Place]] = [[] for _ in range(max(self._thread_of_region, default=0) + 1)]
        threads[0] += receives
        while any(rest):
            chosen: dict[int, Place] = {}
            for region in reversed(range(num_regions)):
                thread = self._thread_of_region[region]
                if thread not in chosen and rest[region] and self.needs[rest[region][0]] <= done:
                    chosen[thread] = rest[region].popleft()
            if not chosen:
                raise ValueError(f"the regions wait for one another: {[each[0] for each in rest if each]}")
            for thread, place in chosen.items():
                threads[thread].append(place)
            done.update(chosen.values())
        return threads


def _divide(areas: Sequence[int], num_threads: int) -> list[int]:
    """The thread of each region: neighbours together, so that each thread has about as much of the wafer."""
    total, before = sum(areas) or 1, 0
    numbers = []
    for area in areas:
        numbers.append(min(num_threads - 1, int((before + area / 2) * num_threads / total)))
        before += area
    known = {number: index for index, number in enumerate(sorted(set(numbers)))}
    return [known[number] for number in numbers]

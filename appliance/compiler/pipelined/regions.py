"""Divides a wafer into regions: how many, which layers each has, and where it lies.

Regions work at the same time, each on a core of the wafer's host, so a step takes as long as the slowest region. Layers
are divided in the order of the network so that the slowest region has the least work. A further region is made only if
it makes the slowest faster. Areas are in proportion to the work, as on a wafer whose cores are all alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.partition.layers import INPUT
from appliance.drawing.floor_plan import WIDTH, plan_floor
from wsc.v1 import plan_pb2

# Plans must not depend on the machine on which they are made, so regions are found with fixed rates. Only the
# proportions of these rates matter.
NOMINAL: Final = MachineModel(
    source="nominal",
    float32_flops_per_second=5e10,
    half_flops_per_second=1e11,
    bytes_per_second=1e10,
    stream_bytes_per_second=1e10,
    operation_seconds=4e-6,
    message_seconds=35e-6,
)
# The fewest regions are chosen whose slowest takes at most this much longer than with the most regions.
_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Regions:
    """The regions of a replica, in the order of the network. All replicas have the same regions.

    Attributes:
        layers: the layers of each region.
        seconds: the predicted work of each region in a step.
        num_replicas: number of replicas on the wafer.
    """

    layers: Sequence[Sequence[str]]
    seconds: Sequence[float]
    num_replicas: int

    def region_of(self) -> Mapping[str, int]:
        """By layer: the number of its region."""
        return {layer: region for region, layers in enumerate(self.layers) for layer in layers}

    def messages(self) -> list[plan_pb2.Region]:
        """The regions of all replicas with names and areas, without instructions. A replica is a strip of the wafer."""
        names = [_name(layers) for layers in self.layers]
        shortest = max(sum(self.seconds), 1e-9) / 1000  # a region without work has an area too, so that it is visible
        work = [(name, max(seconds, shortest)) for name, seconds in zip(names, self.seconds, strict=True)]
        width = WIDTH // self.num_replicas
        return [
            plan_pb2.Region(
                name=place.layer if self.num_replicas == 1 else f"replica {replica}: {place.layer}",
                x=replica * width + place.x,
                y=place.y,
                width=place.width,
                height=place.height,
            )
            for replica in range(self.num_replicas)
            for place in plan_floor(work, width)
        ]


def find_regions(seconds: Mapping[str, float], cores: int, num_replicas: int) -> Regions:
    """Divides the layers of a replica into regions, at least one.

    Args:
        seconds: by layer, in order, the predicted seconds of all its work in a step.
        cores: the cores of a replica, which is the most regions.
        num_replicas: number of replicas.
    """
    amounts = list(seconds.values())
    layers = list(seconds)
    best: list[list[int]] = [_ends(amounts, count) for count in range(1, max(min(cores, len(layers)), 1) + 1)]
    slowest = [max(_sums(amounts, ends)) for ends in best]
    ends = next(ends for ends, longest in zip(best, slowest, strict=True) if longest <= slowest[-1] * _GAIN)
    begins = [0, *ends[:-1]]
    return Regions(
        [layers[begin:end] for begin, end in zip(begins, ends, strict=True)],
        _sums(amounts, ends),
        num_replicas,
    )


def _ends(amounts: Sequence[float], count: int) -> list[int]:
    """Divides amounts into `count` consecutive parts whose largest is minimal. Returns where each part ends."""
    # Dynamic programming: largest[part][end] is the smallest possible largest part of amounts[:end] in `part` parts.
    before = [0.0, *accumulate(amounts)]
    size = len(amounts)
    largest = [[float("inf")] * (size + 1) for _ in range(count + 1)]
    begins = [[0] * (size + 1) for _ in range(count + 1)]
    largest[0][0] = 0.0
    for part in range(1, count + 1):
        for end in range(part, size + 1):
            for begin in range(part - 1, end):
                most = max(largest[part - 1][begin], before[end] - before[begin])
                if most < largest[part][end]:
                    largest[part][end], begins[part][end] = most, begin
    ends = [size]
    for part in range(count, 1, -1):
        ends.append(begins[part][ends[-1]])
    return ends[::-1]


def _sums(amounts: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [sum(amounts[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _name(layers: Sequence[str]) -> str:
    named = [layer or "model" for layer in layers if layer != INPUT] or [INPUT]
    return named[0] if len(named) == 1 else f"{named[0]} - {named[-1]}"

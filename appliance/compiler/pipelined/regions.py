"""How many regions a wafer is divided into, which layers each has, and where it lies.

Regions work at the same time, each on a core of the wafer's host; a step takes as long as the slowest needs. So layers
are divided, in the order of the network, so that the slowest has least to do; and a region that would make no other
one faster is not made. Areas are in proportion to the work, as on a wafer whose cores are all alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.partition.layers import INPUT
from appliance.drawing.floor_plan import WIDTH, plan_floor
from wsc.v1 import plan_pb2

# Plans must not depend on the machine that they are made on. Only the proportions of these rates matter.
NOMINAL: Final = MachineModel(
    source="nominal",
    float32_flops_per_second=5e10,
    half_flops_per_second=1e11,
    bytes_per_second=1e10,
    stream_bytes_per_second=1e10,
    operation_seconds=4e-6,
    message_seconds=35e-6,
)
# One more region must make the slowest so much faster.
_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Regions:
    """Those of one replica in the order of the network; each replica has the same."""

    layers: Sequence[Sequence[str]]
    seconds: Sequence[float]  # of each in a step
    num_replicas: int

    def region_of(self) -> Mapping[str, int]:
        """By layer."""
        return {layer: region for region, layers in enumerate(self.layers) for layer in layers}

    def messages(self) -> list[plan_pb2.Region]:
        """With names and places, without instructions: replica by replica, each in a strip of the wafer."""
        names = [_name(layers) for layers in self.layers]
        shortest = max(sum(self.seconds), 1e-9) / 1000  # what takes no time is drawn too
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
    """Divides layers, given in order with the predicted seconds of all their work in a step. There is at least one.

    cores, seconds: of a replica.
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
    """Where `count` parts end, of which the largest is as small as it can be."""
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

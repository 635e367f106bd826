"""The machines that a step can be planned for: the public figures of the real systems, and this computer."""

from dataclasses import dataclass
from typing import Final

from appliance.compiler.core.target import DEFAULT_WAFER_MEMORY_BYTES
from appliance.compiler.cost.machine_model import MachineModel
from waferbox.prediction.simulation import Compute, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a wafer is.

    Attributes:
        name: the name of the system.
        wafer_memory_bytes: the memory of a wafer.
        rates: the rates of a cluster of such machines.
        source: where the figures come from.
    """

    name: str
    wafer_memory_bytes: int
    rates: Rates
    source: str


def _system(name: str, memory_bytes: int, flops_per_second: float, bytes_per_second: float, source: str) -> Machine:
    # Twelve ports of 100 Gbit/s connect a system. What a MemoryX or a SwarmX node does by itself is not published, so
    # these are no slower than the links.
    link = 12 * 100e9 / 8
    rates = Rates(
        wafer=Compute(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second),
        memoryx=Compute(bytes_per_second=4 * link),
        swarmx_bytes_per_second=4 * link,
        link_bytes_per_second=link,
        latency_seconds=10e-6,
        frame_seconds=5e-6,
    )
    return Machine(name=name, wafer_memory_bytes=memory_bytes, rates=rates, source=source)


# Published peaks count zeros that are skipped; dense products of halves reach about a tenth of them.
_DENSE_SHARE: Final = 0.1

CS2: Final = _system(
    "CS-2", 40 * 10**9, 62.5e15 * _DENSE_SHARE, 20e15, "public figures: 40 GB, 20 PB/s, 62.5 Pflop/s at most"
)
CS3: Final = _system(
    "CS-3", 44 * 10**9, 125e15 * _DENSE_SHARE, 21e15, "public figures: 44 GB, 21 PB/s, 125 Pflop/s at most"
)


def this_machine(model: MachineModel) -> Machine:
    """Returns this computer as a wafer. model: its measured rates."""
    rates = Rates(
        wafer=Compute(
            flops_per_second=model.float32_flops_per_second,
            bytes_per_second=model.bytes_per_second,
            call_seconds=model.operation_seconds,
        ),
        memoryx=Compute(bytes_per_second=model.bytes_per_second, call_seconds=model.operation_seconds),
        swarmx_bytes_per_second=model.bytes_per_second,
        link_bytes_per_second=model.stream_bytes_per_second,
        latency_seconds=model.message_seconds,
        frame_seconds=model.message_seconds / 4,
    )
    return Machine(
        name="this computer", wafer_memory_bytes=DEFAULT_WAFER_MEMORY_BYTES, rates=rates, source=model.source
    )

"""What a cluster of a given size is made of, as far as a prediction rests on it."""

import math
from dataclasses import dataclass, fields

from appliance.compiler.cost.machine_model import MachineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a role computes with. A rate may be infinite: that costs nothing."""

    flops_per_second: float = math.inf  # of products
    bytes_per_second: float = math.inf  # of what is read and written element by element
    call_seconds: float = 0.0  # of each operation, however small

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("call_seconds",))

    def model(self) -> MachineModel:
        """As the compiler predicts times."""
        return MachineModel(
            source="rates that were given",
            float32_flops_per_second=self.flops_per_second,
            half_flops_per_second=self.flops_per_second,
            bytes_per_second=self.bytes_per_second,
            stream_bytes_per_second=math.inf,
            operation_seconds=self.call_seconds,
            message_seconds=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one wafer, one shard of MemoryX, one node of SwarmX, and each link: a role has a host to itself."""

    wafer: Compute
    memoryx: Compute
    swarmx_bytes_per_second: float  # that a node adds up, counted as they come in
    link_bytes_per_second: float = math.inf  # of each host, in each direction
    latency_seconds: float = 0.0  # of a frame, from thread to thread
    frame_seconds: float = 0.0  # that a thread spends on each frame that it sends or takes

    def __post_init__(self) -> None:
        _check_rates(self, seconds=("latency_seconds", "frame_seconds"))


def _check_rates(rates: object, seconds: tuple[str, ...]) -> None:
    for field in fields(rates):  # type: ignore[arg-type]
        value = getattr(rates, field.name)
        if isinstance(value, float | int):
            least = value >= 0 if field.name in seconds else value > 0
            if not least or (field.name in seconds and math.isinf(value)):
                raise ValueError(f"{field.name} cannot be {value}")

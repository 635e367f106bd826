"""What a module is compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The cluster, as far as a plan depends on it."""

    num_csx: int
    num_shards: int
    # States that lie on a MemoryX shard already, from an execution before.
    pinned_shards: Mapping[str, int] = field(default_factory=dict)
    wafer_memory_bytes: int = 8 << 30
    # Weights stay on a wafer between two uses if so many segments, or fewer, lie between them.
    prefetch_layers: int = 4

    def __post_init__(self) -> None:
        if self.num_csx < 1 or self.num_shards < 1:
            raise ValueError(f"a target has at least one wafer and one shard, not {self.num_csx} and {self.num_shards}")

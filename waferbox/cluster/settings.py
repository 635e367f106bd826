"""Which processes a cluster consists of."""

from dataclasses import dataclass

from interconnect.swarmx_tree import tree_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Which processes a cluster consists of, beside its management service."""

    wafers: int = 1
    memoryx: int = 1
    workers: int | None = None  # in all; None: one for each wafer
    swarmx: int | None = None  # None: as many as a tree over the wafers has
    listen: str = "127.0.0.1:0"  # the management service
    page: str | None = None  # where management serves a page, as host:port; None: nowhere
    metrics: bool = False  # every process serves figures for Prometheus, at any port
    threads: int | None = None  # of a wafer; None: its share of the cores
    state_dir: str | None = None  # where MemoryX keeps weights and optimizer state; None: in memory
    memory_limit: str | None = None  # of each shard of MemoryX, such as "8g"; the rest is in state_dir
    cache_root: str | None = None  # None: the management service's default
    vendor_python: str | None = None  # serve the vendor's client, whose environment has this interpreter
    compile_root: str | None = None  # below which scripts may name folders for artifacts; None: the cache root alone

    @property
    def roles(self) -> dict[str, int]:
        """How many processes of each role module."""
        return {
            "memoryx": self.memoryx,
            "swarmx": tree_size(self.wafers) if self.swarmx is None else self.swarmx,
            "wafer": self.wafers,
            "workers": self.wafers if self.workers is None else self.workers,
        }

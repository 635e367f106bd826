"""What a management service is told when it is started."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    cache_root: Path  # artifacts of the compiler lie below it
    compile_root: Path | None = None  # below which scripts may name folders of their own; None: the cache root alone
    lease_seconds: float = 5.0  # a node that says nothing for so long is lost

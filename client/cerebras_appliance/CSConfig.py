"""Where older releases have CSConfig."""

from cstorch.distributed.cs_config import CSConfig

__all__ = ["CSConfig"]

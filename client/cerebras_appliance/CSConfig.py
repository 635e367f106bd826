"""CSConfig, under the module name of older releases."""

from cstorch.distributed.cs_config import CSConfig

__all__ = ["CSConfig"]

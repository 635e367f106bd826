"""Flags of the backends, as in `cstorch.backends.csx.precision.optimization_level = 2`. Unknown: an AttributeError.

For a while: `with cstorch.backends.csx.precision(optimization_level=2):`.
"""

from cstorch.backends.csx_flags import Csx

__all__ = ["csx", "reset"]

csx = Csx()


def reset() -> None:
    """Sets all flags to their defaults.

    Raises:
        UsageError: It is called inside the loop of an executor.

    Reference: release 2.10, `cerebras.pytorch.backends`.
    """
    csx.reset()

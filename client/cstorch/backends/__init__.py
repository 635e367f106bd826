"""Flags of the backends, as in `cstorch.backends.csx.precision.optimization_level = 2`. Unknown: an AttributeError.

For a while: `with cstorch.backends.csx.precision(optimization_level=2):`.
"""

from cstorch.backends.csx_flags import Csx

__all__ = ["csx", "reset"]

csx = Csx()


def reset() -> None:
    """Gives all flags their defaults."""
    csx.reset()

"""ATen's numbers of the reductions of a loss."""

from typing import Final

NONE: Final = 0
MEAN: Final = 1
TOTAL: Final = 2

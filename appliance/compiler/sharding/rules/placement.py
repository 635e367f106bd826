"""Where the elements of a value are, when a step runs on several wafers.

R             every wafer has the whole value
S(dim, outer) dimension dim, read as (outer, rest), has its rest cut in equal blocks, one for each wafer
P(reduction)  every wafer has a value of the full shape; the true one is their sum, maximum or minimum
"""

from dataclasses import dataclass
from typing import Final, Literal

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """R, S or P, with what belongs to it."""

    kind: Literal["R", "S", "P"]
    dim: int = 0
    outer: int = 1
    reduction: Literal["", "sum", "max", "min"] = ""

    @property
    def is_sharded(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    def at(self, dim: int) -> "Placement":
        """The same cut, of another dimension."""
        return Placement("S", dim, self.outer)

    def local_shape(self, shape: Shape, num_parts: int) -> Shape:
        """What a part has of a value of this shape. ValueError if it cannot be cut evenly."""
        if not self.is_sharded:
            return shape
        size = shape[self.dim]
        if size % (self.outer * num_parts):
            raise ValueError(f"dimension {self.dim} of {list(shape)} cannot be cut in {num_parts} parts")
        return (*shape[: self.dim], size // num_parts, *shape[self.dim + 1 :])

    def __str__(self) -> str:
        match self.kind:
            case "R":
                return "replicated"
            case "P":
                return f"partial ({self.reduction})"
            case _:
                return f"sharded in dimension {self.dim}" + (f" of {self.outer} blocks" if self.outer > 1 else "")


R: Final = Placement("R")
SUM: Final = Placement("P", reduction="sum")
MAX: Final = Placement("P", reduction="max")
MIN: Final = Placement("P", reduction="min")


def sharded(dim: int, outer: int = 1) -> Placement:
    """S(dim, outer)."""
    return Placement("S", dim, outer)

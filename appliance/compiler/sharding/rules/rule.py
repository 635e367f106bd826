"""Placements, and what a sharding rule is: from placements of an operation's operands to placements of its results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, Literal

from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs

# --- Placements -------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a value are when a step runs on several wafers.

    R             replicated: each wafer has the whole value.
    S(dim, outer) sharded: dimension `dim`, read as (outer, rest), has its rest divided into equal blocks, one for each
                  wafer. `outer` is more than 1 where a reshape or a concatenation has put several sharded dimensions
                  into one.
    P(reduction)  partial: each wafer has a value of the full shape; the true value is their sum, maximum or minimum.
    """

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
        """The same sharding of another dimension."""
        return sharded(dim, self.outer)

    def local_shape(self, shape: Shape, num_parts: int) -> Shape:
        """The shape of a part of a value. Raises ValueError if the dimension cannot be divided evenly."""
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


@cache  # equal placements are compared all the time: the same object is faster
def sharded(dim: int, outer: int = 1) -> Placement:
    """S(dim, outer)."""
    return Placement("S", dim, outer)


# --- Rules ------------------------------------------------------------------------------------------------------------

ONE_WAFER: Final = "use num_csx=1, or write it without mixing different samples"


class Mixes(Exception):
    """Raised by a rule that does not hold for the placements, mostly since the operation mixes different samples.

    Operands are gathered then. The message is the reason, which begins with the name of the operation.
    """


class Decompose(Exception):
    """Raised by a rule if the operation contains a factor or a statistic of the whole batch, such as a mean.

    The operation is replaced by several (`sharding/decompose.py`), which have rules of their own.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The placements that an operation needs and makes.

    Attributes:
        operands: the placement that each operand must have. If it has another: a partial operand is reduced, a part is
            made of a replicated one, a sharded one is gathered if it is needed whole; anything else is an error.
        results: the placement of each result.
        attributes: the operation's attributes that have another value for a part of the batch.
        position: the attribute whose value is where the part begins in the dimension that is cut; "" if there is none.
            Only parts that are computed one after the other may differ so.
    """

    operands: Sequence[Placement]
    results: Sequence[Placement]
    attributes: Mapping[str, AttrValue] = field(default_factory=dict)
    position: str = ""


class Query:
    """An operation with the placements of its operands: the input of a rule."""

    def __init__(
        self, op: Operation, placements: Sequence[Placement], num_parts: int, *, over_time: bool = False
    ) -> None:
        """over_time: whether the parts are computed one after the other, so that they may have other attributes."""
        self.op = op
        self.placements = placements
        self.num_parts = num_parts
        self.over_time = over_time

    @cached_property
    def attributes(self) -> dict[str, AttrValue]:
        return attrs(self.op)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        return self.attributes.get(name, default)

    @property
    def operands(self) -> Sequence[SSAValue]:
        return self.op.operands

    def shape(self, operand: int) -> Shape:
        return types.shape(self.op.operands[operand])

    def result_shape(self, result: int = 0) -> Shape:
        return types.shape(self.op.results[result])

    def axis(self, value: int, operand: int = 0) -> int:
        """The dimension of an operand that a number, which may be negative, stands for."""
        rank = len(self.shape(operand))
        return value + rank if value < 0 else value

    @property
    def sharded(self) -> list[Placement]:
        return [placement for placement in self.placements if placement.is_sharded]

    def replicated(self) -> Outcome:
        """The outcome that needs all operands whole: partial ones are reduced, sharded ones gathered."""
        return Outcome(operands=[R] * len(self.placements), results=[R] * len(self.op.results))

    def mixes(self, why: str) -> Mixes:
        """The reason for which no rule holds."""
        return Mixes(f"{self.op.name} {why}")


Rule = Callable[[Query], Outcome]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = function
        return function

    return register

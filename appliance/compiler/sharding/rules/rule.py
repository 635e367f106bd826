"""What a sharding rule is: placements of operands in, placements of results out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError, refuse
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs

# --- Where the elements of a value are, when a step runs on several wafers --------------------------------------------
#
# R             every wafer has the whole value
# S(dim, outer) dimension dim, read as (outer, rest), has its rest cut in equal blocks, one for each wafer
# P(reduction)  every wafer has a value of the full shape; the true one is their sum, maximum or minimum


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


# --- What a sharding rule gets and returns, and the registry of rules by operation name -------------------------------


ONE_WAFER: Final = "use num_csx=1, or write it without mixing different samples"


class Decompose(Exception):
    """The operation hides a factor or a statistic of the whole batch: its parts have rules of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an operation needs and makes.

    wants: the placement that each operand must have. Where it has another: a partial operand is reduced first, a
    replicated one is cut locally, a sharded one is gathered where it is wanted whole, and an error otherwise.
    results: the placement of each result.
    attributes: those that have another value on one wafer.
    """

    wants: Sequence[Placement]
    results: Sequence[Placement]
    attributes: Mapping[str, AttrValue] = field(default_factory=dict)


class Query:
    """One operation with the placements that its operands have."""

    def __init__(self, op: Operation, placements: Sequence[Placement], num_parts: int) -> None:
        self.op = op
        self.placements = placements
        self.num_parts = num_parts

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
        """A dimension number that may be negative, of an operand."""
        rank = len(self.shape(operand))
        return value + rank if value < 0 else value

    @property
    def sharded(self) -> list[Placement]:
        return [placement for placement in self.placements if placement.is_sharded]

    def replicated(self) -> Outcome:
        """All operands are needed whole: partial ones are reduced first, sharded ones gathered."""
        return Outcome(wants=[R] * len(self.placements), results=[R] * len(self.op.results))

    def mixes(self, why: str) -> CompileError:
        """The error for an operation that brings different samples together."""
        return refuse(self.op, why, ONE_WAFER)


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

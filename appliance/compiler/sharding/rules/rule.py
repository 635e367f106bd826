"""What a sharding rule gets and returns, and the registry of rules by operation name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError, refuse
from appliance.compiler.sharding.rules.placement import Placement, R, Shape
from cirh.dialect import types
from cirh.dialect.attributes import AttrValue, attrs

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

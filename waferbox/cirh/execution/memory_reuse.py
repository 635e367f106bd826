"""How a kernel reuses memory where it is short: parts are joined early, and operands are written over.

A large value may be joined of parts of which each is made by many operations, such as the slices of a row. If all parts
were kept until the last one is there, they and the joined value would exist at the same time. So each part that is read
by the join alone is copied to its place at once.

A pointwise operation writes its result over an operand that nothing reads afterwards. It does so only where it is known
that no other value shares the operand's memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import Const, func_of

# The attribute of the function of a kernel that reuses memory.
REUSES_MEMORY: Final = "reuses_memory"

# Torch's calls for these may write to the memory of an operand.
_POINTWISE: Final = frozenset(
    f"cirh.{name}"
    for name in (
        *("Add", "Sub", "Mul", "Div", "Pow", "Select"),
        *("Abs", "Cos", "Erf", "Exp", "Log", "Neg", "Reciprocal", "RoundCb16", "Rsqrt", "Sigmoid", "Sin", "Sqrt"),
        *("Relu", "Tanh"),
    )
)
# The results of these are never views of an operand. Those of all others may be.
_NEW: Final = _POINTWISE | {
    *("cirh.LinearCrossEntropyGrad", "cirh.MatMul", "aten.addmm", "aten.bmm", "aten.mm", "aten.slice_backward")
}


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """The place of a part in a joined value.

    Attributes:
        join: the operation that joins it.
        axis: the dimension in which parts lie one behind the other.
        start: the begin of the part in that dimension.
    """

    join: Operation
    axis: int
    start: int


@dataclass(frozen=True, slots=True)
class MemoryReuse:
    """How a kernel reuses memory.

    Attributes:
        early: by part of a joined value that is copied to its place as soon as it is made, that place.
        written_over: by operation, the operand over which its result is written.
    """

    early: Mapping[SSAValue, EarlyPart] = field(default_factory=dict)
    written_over: Mapping[Operation, SSAValue] = field(default_factory=dict)


def let_reuse_memory(module: ModuleOp) -> None:
    """Makes a kernel reuse memory."""
    func_of(module).attributes[REUSES_MEMORY] = UnitAttr()


def reuses_memory(module: ModuleOp) -> bool:
    """Whether a kernel reuses memory."""
    return REUSES_MEMORY in func_of(module).attributes


def memory_reuse(module: ModuleOp, ops: Sequence[Operation], returned: Sequence[SSAValue]) -> MemoryReuse:
    """How a kernel reuses memory: not at all without the attribute.

    Args:
        module: the kernel.
        ops: the operations that are run, in order, without constants.
        returned: the results of the kernel, which are kept.
    """
    if not reuses_memory(module):
        return MemoryReuse()
    return MemoryReuse(early=_early_parts(ops, returned), written_over=_written_over(ops, returned))


def _early_parts(ops: Sequence[Operation], returned: Sequence[SSAValue]) -> dict[SSAValue, EarlyPart]:
    kept = set(returned)
    found: dict[SSAValue, EarlyPart] = {}
    for op in ops:
        if op.name != "cirh.Concat":
            continue
        given = attrs(op).get("axis", 0)
        assert isinstance(given, int)
        axis = given % len(types.shape(op.results[0]))
        start = 0
        for part in op.operands:
            if part not in kept and part.has_one_use() and _is_made_where_it_stands(part):
                found[part] = EarlyPart(op, axis, start)
            start += types.shape(part)[axis]
    return found


def _is_made_where_it_stands(value: SSAValue) -> bool:
    """Whether a value is made in the place of its operation. Broadcasts and constants are made where they are read."""
    owner = value.owner
    return isinstance(owner, Operation) and not isinstance(owner, Const) and owner.name != "cirh.BroadcastInDim"


def _written_over(ops: Sequence[Operation], returned: Sequence[SSAValue]) -> dict[Operation, SSAValue]:
    position = {op: number for number, op in enumerate(ops)}
    # By value: the position of the last reader of its memory, as far as is known.
    read_until: dict[SSAValue, float] = dict.fromkeys(returned, math.inf)

    def is_read_until(reader: Operation) -> float:
        """Until when an operation, or what may show the memory of its operands, reads them."""
        begin = float(position[reader])
        return begin if reader.name in _NEW else max([begin, *(read_until[value] for value in reader.results)])

    found: dict[Operation, SSAValue] = {}
    for op in reversed(ops):
        for value in op.results:
            readers = {use.operation for use in value.uses if use.operation in position}
            until = {reader: is_read_until(reader) for reader in readers}
            read_until[value] = max([position[op], *until.values(), read_until.get(value, 0)])
            if op.name not in _NEW:
                continue
            last = max(readers, key=position.__getitem__, default=None)
            if (
                last is not None
                and last.name in _POINTWISE
                and last not in found
                and value.type == last.results[0].type
                and read_until[value] == position[last]
                and all(end < position[last] for reader, end in until.items() if reader is not last)
            ):
                found[last] = value
    return found

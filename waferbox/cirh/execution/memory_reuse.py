"""How a kernel reuses memory where it is short: parts are joined early, operands and arguments are written over.

A large value may be joined of parts of which each is made by many operations, such as the slices of a row. If all parts
were kept until the last one is there, they and the joined value would exist at the same time. So each part that is read
by the join alone is copied to its place at once.

A pointwise operation writes its result over an operand that nothing reads afterwards. It does so only where it is known
that no other value shares the operand's memory.

A value may be joined in the memory of an argument of the same type, if nothing reads a part of the argument after the
part of the joined value that takes its place was made: as the gradient of what a layer reads, slice by slice, over the
gradient of what it makes. The caller says which arguments may be written over.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Block, Operation, SSAValue

from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import Const, func_of, return_of

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
_INPUT_OF_CROSS_ENTROPY: Final = 4  # the operand of LinearCrossEntropyGrad whose gradient is its first result
# The results of these are never views of an operand. Those of all others may be.
_NEW: Final = _POINTWISE | {
    *(
        "cirh.LinearCrossEntropy",
        "cirh.LinearCrossEntropyGrad",
        "cirh.MatMul",
        "aten.addmm",
        "aten.bmm",
        "aten.mm",
        "aten.slice_backward",
    )
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
        written_over: by operation, the operand over which its first result is written.
        joined_over: by operation that joins early parts, the argument in whose memory it does.
        arguments: by operation of either kind, the argument in whose memory its first result lies, if it does in one.
    """

    early: Mapping[SSAValue, EarlyPart] = field(default_factory=dict)
    written_over: Mapping[Operation, SSAValue] = field(default_factory=dict)
    joined_over: Mapping[Operation, SSAValue] = field(default_factory=dict)
    arguments: Mapping[Operation, SSAValue] = field(default_factory=dict)


def let_reuse_memory(module: ModuleOp) -> None:
    """Makes a kernel reuse memory."""
    func_of(module).attributes[REUSES_MEMORY] = UnitAttr()


def reuses_memory(module: ModuleOp) -> bool:
    """Whether a kernel reuses memory."""
    return REUSES_MEMORY in func_of(module).attributes


def memory_reuse(
    module: ModuleOp, ops: Sequence[Operation], returned: Sequence[SSAValue], overwritable: Collection[int] = ()
) -> MemoryReuse:
    """How a kernel reuses memory: not at all without the attribute.

    Args:
        module: the kernel.
        ops: the operations that are run, in order, without constants.
        returned: the results of the kernel, which are kept.
        overwritable: the arguments, by number, whose memory no other value shares, and which nothing reads afterwards.
    """
    if not reuses_memory(module):
        return MemoryReuse()
    readings = _Readings(ops, returned)
    early = _early_parts(ops, returned)
    free = [func_of(module).block.args[index] for index in sorted(overwritable)]
    joined_over = _joined_over(ops, early, readings, free)
    free = [argument for argument in free if argument not in joined_over.values()]
    written_over = _written_over(ops, readings)
    arguments = dict(joined_over)
    for argument in free:
        value = _reshaped(argument, readings)
        last = _writer_over(value, readings)
        if last is not None and last not in written_over:
            written_over[last], arguments[last] = value, argument
    return MemoryReuse(early=early, written_over=written_over, joined_over=joined_over, arguments=arguments)


def results_of_their_own(module: ModuleOp) -> frozenset[int]:
    """The results of a kernel, by number, whose memory no argument, no constant and no other result shares."""
    shown = [_shown(value) for value in return_of(module).operands]
    times = Counter(value for values in shown for value in values)
    return frozenset(
        index
        for index, values in enumerate(shown)
        if all(times[value] == 1 and _is_made(value.owner) for value in values)
    )


def _is_made(owner: Operation | Block) -> bool:
    return isinstance(owner, Operation) and not isinstance(owner, Const)


def shown_arguments(module: ModuleOp) -> frozenset[int]:
    """The arguments of a kernel, by number, whose memory a result may share."""
    shown = set().union(*map(_shown, return_of(module).operands))
    return frozenset(index for index, argument in enumerate(func_of(module).block.args) if argument in shown)


def _shown(value: SSAValue) -> set[SSAValue]:
    """The values in whose memory a value may lie, itself among them."""
    found: set[SSAValue] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            owner = each.owner
            if isinstance(owner, Operation) and owner.name not in _NEW and not _joins(owner):
                stack.extend(owner.operands)
    return found


def terms_of_sum(op: Operation) -> Sequence[SSAValue]:
    """The values that an operation adds: both of an addition, the first operand of a product that is added to it."""
    if op.name == "cirh.Add":
        return op.operands
    if op.name == "aten.addmm" and attrs(op).get("alpha", 1) == attrs(op).get("beta", 1) == 1:
        return op.operands[:1]
    return ()


def _may_be_written_over(value: SSAValue, reader: Operation) -> bool:
    """Whether an operation can write its result over an operand."""
    is_possible = (
        reader.name in _POINTWISE
        or value in terms_of_sum(reader)
        or (reader.name == "cirh.LinearCrossEntropyGrad" and value is reader.operands[_INPUT_OF_CROSS_ENTROPY])
    )
    return is_possible and value.type == reader.results[0].type


def _joins(op: Operation) -> bool:
    return op.name == "cirh.Concat" and len(op.operands) > 1


class _Readings:
    """The positions at which the memory of values is read, as far as is known.

    Attributes:
        position: the place of each operation in the order.
    """

    def __init__(self, ops: Sequence[Operation], returned: Sequence[SSAValue]) -> None:
        self.position = {op: number for number, op in enumerate(ops)}
        self._returned = frozenset(returned)
        self._until: dict[SSAValue, float] = dict.fromkeys(returned, math.inf)
        for op in reversed(ops):
            for value in op.results:
                self._until[value] = max([self.position[op], *self.by_reader(value).values(), self._of(value)])

    def until(self, value: SSAValue) -> float:
        """The position of the last reader of a value's memory; infinity if the kernel returns it."""
        return max([*self.by_reader(value).values(), self._of(value)])

    def is_returned(self, value: SSAValue) -> bool:
        """Whether the kernel returns a value itself."""
        return value in self._returned

    def by_reader(self, value: SSAValue) -> dict[Operation, float]:
        """By operation that reads a value: until when it, or what may show the memory of its operands, is read."""
        readers = {use.operation for use in value.uses if use.operation in self.position}
        return {reader: self._by(reader) for reader in readers}

    def _by(self, reader: Operation) -> float:
        begin = float(self.position[reader])
        return begin if reader.name in _NEW else max([begin, *(self._of(value) for value in reader.results)])

    def _of(self, value: SSAValue) -> float:
        return self._until.get(value, -1.0)


def _early_parts(ops: Sequence[Operation], returned: Sequence[SSAValue]) -> dict[SSAValue, EarlyPart]:
    kept = set(returned)
    found: dict[SSAValue, EarlyPart] = {}
    for op in ops:
        if op.name != "cirh.Concat":
            continue
        for part, axis, start in _parts(op):
            if part not in kept and part.has_one_use() and _is_made_where_it_stands(part):
                found[part] = EarlyPart(op, axis, start)
    return found


def _parts(join: Operation) -> Iterator[tuple[SSAValue, int, int]]:
    """Yields the parts of a joined value, each with the dimension and its begin in that."""
    given = attrs(join).get("axis", 0)
    assert isinstance(given, int)
    axis = given % len(types.shape(join.results[0]))
    start = 0
    for part in join.operands:
        yield part, axis, start
        start += types.shape(part)[axis]


def _is_made_where_it_stands(value: SSAValue) -> bool:
    """Whether a value is made in the place of its operation. Broadcasts and constants are made where they are read."""
    owner = value.owner
    return isinstance(owner, Operation) and not isinstance(owner, Const) and owner.name != "cirh.BroadcastInDim"


def _written_over(ops: Sequence[Operation], readings: _Readings) -> dict[Operation, SSAValue]:
    found: dict[Operation, SSAValue] = {}
    for op in reversed(ops):
        for value in op.results if op.name in _NEW else ():
            last = _writer_over(value, readings)
            if last is not None and last not in found:
                found[last] = value
    return found


def _writer_over(value: SSAValue, readings: _Readings) -> Operation | None:
    """The operation that can write its result over a value, since it is the last to read its memory; or None."""
    until = readings.by_reader(value)
    last = max(until, key=readings.position.__getitem__, default=None)
    if last is None or not _may_be_written_over(value, last) or readings.until(value) != readings.position[last]:
        return None
    others = (end for reader, end in until.items() if reader is not last)
    return last if all(end < readings.position[last] for end in others) else None


def _reshaped(value: SSAValue, readings: _Readings) -> SSAValue:
    """A value, or the last of the shapes that it is given, if nothing else reads it."""
    while len(readers := readings.by_reader(value)) == 1:
        (reader,) = readers
        if reader.name != "cirh.Reshape" or readings.is_returned(value):
            break
        value = reader.results[0]
    return value


def _joined_over(
    ops: Sequence[Operation],
    early: Mapping[SSAValue, EarlyPart],
    readings: _Readings,
    arguments: Sequence[SSAValue],
) -> dict[Operation, SSAValue]:
    found: dict[Operation, SSAValue] = {}
    joins = {part.join for part in early.values()}
    for op in (op for op in ops if op in joins):
        for argument in arguments:
            is_free = argument not in found.values() and argument.type == op.results[0].type
            if is_free and _may_be_joined_over(op, argument, early, readings):
                found[op] = argument
                break
    return found


def _may_be_joined_over(
    join: Operation, argument: SSAValue, early: Mapping[SSAValue, EarlyPart], readings: _Readings
) -> bool:
    """Whether nothing reads a part of an argument after the part of the joined value that takes its place was made."""
    (_, axis, _), *_ = _parts(join)
    size = types.shape(argument)[axis]
    reads = [(*_read_range(reader, axis, size), until) for reader, until in readings.by_reader(argument).items()]
    for part, _, start in _parts(join):
        maker = part.owner if part in early else join
        assert isinstance(maker, Operation)
        placed = readings.position[maker]
        end = start + types.shape(part)[axis]
        if any(first < end and start < last and until > placed for first, last, until in reads):
            return False
    return True


def _read_range(reader: Operation, axis: int, size: int) -> tuple[int, int]:
    """The part of an argument that an operation reads in one dimension."""
    given = attrs(reader)
    if reader.name == "aten.slice.Tensor" and given["dim"] == axis:
        assert isinstance(given["start"], int)
        assert isinstance(given["end"], int)
        return given["start"], given["end"]
    return 0, size

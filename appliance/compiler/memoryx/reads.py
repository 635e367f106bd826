"""Who reads what on one shard: for the order of its work, and for what may be overwritten when."""

from collections.abc import Mapping, Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.cut import VIEWS, is_constant
from appliance.compiler.partition.shards import Sharing
from cirh.dialect import types
from cirh.table.lookup import spec

# Component, and the shape of element-wise work in it.
Kind = tuple[int | None, tuple[int, ...] | None]


def is_elementwise(kind: Kind) -> bool:
    """Whether work of this kind is one pass over tensors of one shape."""
    return kind[1] is not None


class Reads:
    """The operations of one shard. Those that are repeated where they are read (`Sharing.sunk`) are seen through."""

    def __init__(self, sharing: Sharing, shard: int, ops: Sequence[Operation]) -> None:
        self._sharing = sharing
        self._ops = sharing.ops[shard]
        self._roots = _view_roots(ops)
        self._kinds = {op: self._kind(op) for op in ops}
        self._operands = {op: self._find_operands(op) for op in ops}
        self._aliases: dict[SSAValue, list[SSAValue]] = {}
        for view, root in self._roots.items():
            self._aliases.setdefault(root, []).append(view)

    def kind(self, op: Operation) -> Kind:
        """What can be one kernel: element-wise work on tensors of one shape in one component, or on single numbers; or
        the rest of it."""
        return self._kinds[op]

    def _kind(self, op: Operation) -> Kind:
        component = self._sharing.component.get(op)
        shape = types.shape(op.results[0])
        return (component, shape if spec(op.name).pointwise and (component is not None or not shape) else None)

    def operands(self, op: Operation) -> list[SSAValue]:
        """What an operation reads, constants excluded."""
        return self._operands[op]

    def _find_operands(self, op: Operation) -> list[SSAValue]:
        operands: list[SSAValue] = []
        for value in op.operands:
            owner = value.owner
            if isinstance(owner, Operation) and owner in self._sharing.sunk:
                operands += [inner for inner in owner.operands if not is_constant(inner)]
            elif not is_constant(value):
                operands.append(value)
        return operands

    def readers(self, value: SSAValue) -> list[Operation]:
        """Operations of this shard that read a value."""
        readers: list[Operation] = []
        for use in value.uses:
            if use.operation in self._sharing.sunk:
                readers += [inner.operation for inner in use.operation.results[0].uses]
            else:
                readers.append(use.operation)
        return [op for op in readers if op in self._ops]

    def aliases(self, value: SSAValue) -> list[SSAValue]:
        """The value and its views: they change when it is overwritten."""
        return [value, *self._aliases.get(value, ())]

    def with_repeated(self, ops: Sequence[Operation]) -> list[Operation]:
        """The operations with the repeated ones that they read, in order of execution."""
        result: dict[Operation, None] = {}
        for op in ops:
            for operand in op.operands:
                if isinstance(operand.owner, Operation) and operand.owner in self._sharing.sunk:
                    result.setdefault(operand.owner)
            result.setdefault(op)
        return list(result)


def _view_roots(ops: Sequence[Operation]) -> Mapping[SSAValue, SSAValue]:
    """Of each view, the value whose memory it shares."""
    roots: dict[SSAValue, SSAValue] = {}
    for op in ops:
        if op.name in VIEWS:
            roots[op.results[0]] = roots.get(op.operands[0], op.operands[0])
    return roots

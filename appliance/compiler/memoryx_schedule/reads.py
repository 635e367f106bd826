"""The readers of each value on a shard, the operations that can be run at a time, and their grouping into kernels."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from xdsl.ir import Operation, SSAValue

from appliance.compiler.partition.cut import VIEWS, is_constant
from appliance.compiler.partition.shards import Sharing
from waferbox.cirh.dialect import types
from waferbox.cirh.table.lookup import spec

# --- Readers ----------------------------------------------------------------------------------------------------------

# Component of an operation, and the shape of its element-wise work. Operations of one kind can be one kernel.
Kind = tuple[int | None, tuple[int, ...] | None]


def is_elementwise(kind: Kind) -> bool:
    """Whether work of this kind is one pass over tensors of one shape."""
    return kind[1] is not None


class Reads:
    """The operations of one shard, with what they read.

    A sunk operation (`Sharing.sunk`) counts as part of each of its readers, which read its operands.
    """

    def __init__(self, sharing: Sharing, shard: int, ops: Sequence[Operation]) -> None:
        self._sharing = sharing
        self._ops = sharing.ops[shard]
        self._roots = _view_roots(ops)
        self._kinds = {op: self._kind(op) for op in ops}
        self._operands = {op: self._find_operands(op) for op in ops}
        self._readers: dict[SSAValue, list[Operation]] = {}
        self._aliases: dict[SSAValue, list[SSAValue]] = {}
        for view, root in self._roots.items():
            self._aliases.setdefault(root, []).append(view)

    def kind(self, op: Operation) -> Kind:
        """The kind of an operation: element-wise work on one shape (also on single numbers), or other work."""
        return self._kinds[op]

    def _kind(self, op: Operation) -> Kind:
        component = self._sharing.component.get(op)
        shape = types.shape(op.results[0])
        return (component, shape if spec(op.name).pointwise and (component is not None or not shape) else None)

    def operands(self, op: Operation) -> list[SSAValue]:
        """Values that an operation reads, without constants."""
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
        if value not in self._readers:
            self._readers[value] = self._find_readers(value)
        return self._readers[value]

    def _find_readers(self, value: SSAValue) -> list[Operation]:
        readers: list[Operation] = []
        for use in value.uses:
            if use.operation in self._sharing.sunk:
                readers += [inner.operation for inner in use.operation.results[0].uses]
            else:
                readers.append(use.operation)
        return [op for op in readers if op in self._ops]

    def aliases(self, value: SSAValue) -> list[SSAValue]:
        """The value and its views, which change when it is overwritten."""
        return [value, *self._aliases.get(value, ())]

    def with_repeated(self, ops: Sequence[Operation]) -> list[Operation]:
        """The operations, and the sunk ones that they read, in order of execution."""
        result: dict[Operation, None] = {}
        for op in ops:
            for operand in op.operands:
                if isinstance(operand.owner, Operation) and operand.owner in self._sharing.sunk:
                    result.setdefault(operand.owner)
            result.setdefault(op)
        return list(result)


def _view_roots(ops: Sequence[Operation]) -> Mapping[SSAValue, SSAValue]:
    """By view, the value whose memory it shares."""
    roots: dict[SSAValue, SSAValue] = {}
    for op in ops:
        if op.name in VIEWS:
            roots[op.results[0]] = roots.get(op.operands[0], op.operands[0])
    return roots


# --- Operations that can be run ---------------------------------------------------------------------------------------


class Frontier:
    """The operations whose received inputs are complete, so that they can be run, one after the other.

    An operation is examined once for each operand that arrives. Looking at all operations after each message would take
    time quadratic in the size of the step. So would looking at all that can be run but wait for their readers, such as
    the decay of every weight for its gradient: each is set aside until an operation is run that depends on it.
    """

    def __init__(self, ops: Collection[Operation], reads: Reads) -> None:
        self._reads = reads
        self._place = {op: index for index, op in enumerate(ops)}
        self._missing = {op: set(reads.operands(op)) for op in ops}
        self._open: set[Operation] = set()
        self._aside: set[Operation] = set()
        self._reach(op for op, missing in self._missing.items() if not missing)

    def add(self, values: Iterable[SSAValue]) -> None:
        """Adds values that have been received."""
        for value in values:
            self._reach(self._without(value))

    def remove(self, ops: Iterable[Operation]) -> None:
        """Removes operations that have been run."""
        self._open.difference_update(ops)

    def set_aside(self, ops: Iterable[Operation]) -> None:
        """Leaves out operations, which can be run at any time from now on, until `taken_back` returns them."""
        for op in ops:
            self._open.remove(op)
            self._aside.add(op)

    def is_aside(self, value: SSAValue) -> bool:
        """Whether an operation that was set aside makes a value."""
        return value.owner in self._aside

    def taken_back(self, ops: Iterable[Operation]) -> list[Operation]:
        """Operations, and those on which they depend and that were set aside, in the order in which they were given."""
        found = list(ops)
        for op in found:
            for value in self._reads.operands(op):
                if isinstance(value.owner, Operation) and value.owner in self._aside:
                    self._aside.remove(value.owner)
                    found.append(value.owner)
        return sorted(found, key=self._place.__getitem__)

    def in_order(self, within: Set[Operation] | None = None) -> list[Operation]:
        """The operations that are not set aside, in the order in which they were given.

        within: only these; None: all.
        """
        return sorted(self._open if within is None else self._open & within, key=self._place.__getitem__)

    def _without(self, value: SSAValue) -> list[Operation]:
        """Removes a value from what operations miss. Returns those that now miss nothing."""
        found = []
        for op in self._reads.readers(value):
            missing = self._missing.get(op)
            if missing and value in missing:
                missing.remove(value)
                if not missing:
                    found.append(op)
        return found

    def _reach(self, ops: Iterable[Operation]) -> None:
        stack = list(ops)
        while stack:
            op = stack.pop()
            self._open.add(op)
            for result in op.results:
                stack += self._without(result)


# --- Batches of operations for one kernel -----------------------------------------------------------------------------


def ready_batches(
    frontier: Frontier,
    reads: Reads,
    have: Collection[SSAValue],
    may_run: Callable[[Operation], bool],
    leaves: Callable[[SSAValue], bool],
    within: Set[Operation] | None = None,
) -> list[list[Operation]]:
    """Batches of operations that can be run now: for each kind, all of them, as one kernel.

    Args:
        frontier: operations whose inputs have been received.
        reads: the readers of each value.
        have: values that have been received or computed.
        may_run: whether an operation may be run now.
        leaves: whether a value is needed even if no operation reads it. A value that is not will not become so.
        within: the operations that are run; None: all.
    """
    batches: dict[Kind, list[Operation]] = {}
    maker: dict[SSAValue, Kind] = {}
    for op in frontier.in_order(within):
        kind = reads.kind(op)
        operands = [value for value in reads.operands(op) if value not in have and not frontier.is_aside(value)]
        # An operation may read a result of its own batch, but not of another batch of this round.
        if may_run(op) and all(value in maker and maker[value] == kind for value in operands):
            batches.setdefault(kind, []).append(op)
            maker.update(dict.fromkeys(op.results, kind))
    found = []
    for kind, batch in batches.items():
        needed = _needed(reads, leaves, kind, batch)
        frontier.set_aside(op for op in batch if op not in needed)
        if needed:
            found.append(frontier.taken_back(needed))
    return found


def _needed(reads: Reads, leaves: Callable[[SSAValue], bool], kind: Kind, batch: Sequence[Operation]) -> Set[Operation]:
    """The operations of an element-wise batch that lead to a value that is needed outside of it.

    The others wait for the operation that reads them, so that an update is one kernel with one pass over its tensors.
    """
    if not is_elementwise(kind):
        return set(batch)
    needed: set[Operation] = set()
    for op in reversed(batch):
        read = [reader for value in op.results for reader in reads.readers(value)]
        wanted = any(leaves(value) for value in op.results)
        if wanted or any(reader in needed or reads.kind(reader) != kind for reader in read):
            needed.add(op)
    return needed

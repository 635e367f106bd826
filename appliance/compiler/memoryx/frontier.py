"""What a shard could compute by now: operations for which all that comes from elsewhere has been received."""

from collections.abc import Collection, Iterable

from xdsl.ir import Operation, SSAValue

from appliance.compiler.memoryx.reads import Reads


class Frontier:
    """Grows as values are received. Each operation is looked at once for each of its operands, not in every round."""

    def __init__(self, ops: Collection[Operation], reads: Reads) -> None:
        self._reads = reads
        self._place = {op: index for index, op in enumerate(ops)}
        self._missing = {op: set(reads.operands(op)) for op in ops}
        self._open: set[Operation] = set()
        self._reach(op for op, missing in self._missing.items() if not missing)

    def add(self, values: Iterable[SSAValue]) -> None:
        """These values are there."""
        for value in values:
            self._reach(self._without(value))

    def remove(self, ops: Iterable[Operation]) -> None:
        """These operations were run."""
        self._open.difference_update(ops)

    def in_order(self) -> list[Operation]:
        """The operations, in the order in which they were given."""
        return sorted(self._open, key=self._place.__getitem__)

    def _without(self, value: SSAValue) -> list[Operation]:
        """The operations that lacked this value alone."""
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

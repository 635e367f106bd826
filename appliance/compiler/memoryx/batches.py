"""Which operations of MemoryX's work are run together: as few kernels as the values that are there allow."""

from collections.abc import Callable, Collection

from xdsl.ir import Operation, SSAValue

from appliance.compiler.memoryx.frontier import Frontier
from appliance.compiler.memoryx.reads import Kind, Reads, is_elementwise


def ready_batches(
    frontier: Frontier,
    reads: Reads,
    have: Collection[SSAValue],
    may_run: Callable[[Operation], bool],
    leaves: Callable[[SSAValue], bool],
) -> list[list[Operation]]:
    """For each kind of work that can go on now, all of it.

    have: values that are there; leaves: whether a value is wanted other than by operations.
    """
    batches: dict[Kind, list[Operation]] = {}
    maker: dict[SSAValue, Kind] = {}
    for op in frontier.in_order():
        if not may_run(op):
            continue
        kind = reads.kind(op)
        operands = [value for value in reads.operands(op) if value not in have]
        # Within a batch operations may follow one another; between batches they must not, in this round.
        if all(value in maker and maker[value] == kind for value in operands):
            batches.setdefault(kind, []).append(op)
            maker.update(dict.fromkeys(op.results, kind))
    whole = (_without_loose_ends(reads, leaves, kind, batch) for kind, batch in batches.items())
    return [batch for batch in whole if batch]


def _without_loose_ends(
    reads: Reads, leaves: Callable[[SSAValue], bool], kind: Kind, batch: list[Operation]
) -> list[Operation]:
    """Of an element-wise batch, what leads to a value that is wanted outside of it.

    The rest waits for the operation that reads it: an update is one kernel, which passes over its tensors once.
    """
    if not is_elementwise(kind):
        return batch
    needed: set[Operation] = set()
    for op in reversed(batch):
        read = [reader for value in op.results for reader in reads.readers(value)]
        wanted = any(leaves(value) for value in op.results)
        if wanted or any(reader in needed or reads.kind(reader) != kind for reader in read):
            needed.add(op)
    return [op for op in batch if op in needed]

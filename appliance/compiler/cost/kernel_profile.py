"""Profiles a kernel of a plan: its arithmetic, its predicted time, and the memory that it needs while it runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.cost.flops import VIEWS, flops
from appliance.compiler.cost.machine_model import MachineModel
from waferbox.cirh.calls import linear_cross_entropy
from waferbox.cirh.calls.attention import block_bytes, choose, is_in_parts
from waferbox.cirh.calls.products import is_by_float32, is_large_product
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.execution.memory_reuse import (
    memory_reuse,
    results_of_their_own,
    reuses_memory,
    shown_arguments,
    terms_of_sum,
)
from waferbox.cirh.table.lookup import site_of
from waferbox.cirh.text.parser import shared_module
from wsc.v1 import plan_pb2

# --- Temporary memory of torch's kernels, beside operands and results -------------------------------------------------

_PRODUCTS = frozenset(
    ["cirh.MatMul", "cirh.DotGeneral", "cirh.AttentionGrad", "cirh.LinearCrossEntropyGrad"]
    + [f"aten.{name}" for name in ("addmm", "bmm", "baddbmm", "mm", "convolution", "convolution_backward")]
)

_FLOAT32_BYTES: Final = 4


def temporary_bytes(op: Operation) -> int:
    """The most temporary bytes of one call; 0 for operations that need little."""
    nbytes = _library_bytes(op)
    if op.name in _PRODUCTS and any(is_by_float32(types.dtype(value)) for value in op.operands):
        # Computed in float32: operands and results are copied, at twice their size, and so is temporary memory.
        return 2 * (nbytes + sum(map(types.nbytes, (*op.operands, *op.results))))
    return nbytes


def _library_bytes(op: Operation) -> int:
    match op.name:
        case "aten.convolution":
            # The operand in the library's own layout, then the result in both layouts.
            return max(types.nbytes(op.operands[0]), types.nbytes(op.results[0]))
        case "aten.convolution_backward":
            gradient, operand = op.operands[:2]
            return types.nbytes(gradient) + types.nbytes(operand)
        case "cirh.MatMul" | "aten.addmm" | "aten.mm" if is_large_product(site_of(op)):
            # Both operands in the library's own layout, on processors for which the wafer chooses that library.
            return sum(map(types.nbytes, op.operands[-2:]))
        case "cirh.LinearCrossEntropy" | "cirh.LinearCrossEntropyGrad":
            return linear_cross_entropy.temporary_bytes(site_of(op))
        case "cirh.Attention" if is_in_parts(site_of(op)):
            query, key = op.operands[:2]
            # The outputs of both calls for some heads, these outputs multiplied, and their sum, both in float32.
            return 8 * _some_heads_bytes(query, key)
        case "cirh.AttentionGrad" if is_in_parts(site_of(op)):
            query, key = op.operands[1:3]
            # Halves are added in float32.
            is_half = types.dtype(query).itemsize < _FLOAT32_BYTES
            sums = 2 * types.nbytes(query) + 4 * types.nbytes(key) if is_half else 0
            return _some_heads_bytes(query, key) + 2 * types.nbytes(key) + sums
        case "cirh.Attention" if choose(site_of(op)).kernel == "products":
            return 2 * block_bytes(site_of(op)) + types.nbytes(op.operands[0])
        case "cirh.AttentionGrad" if choose(site_of(op)).kernel == "products" or attrs(op).get("hides_rows"):
            query, key = op.operands[1:3]
            return 3 * block_bytes(site_of(op)) + types.nbytes(query) + types.nbytes(key)
    return 0


def _some_heads_bytes(query: SSAValue, key: SSAValue) -> int:
    """The bytes of the queries of heads that have different keys."""
    return types.nbytes(query) * types.shape(key)[1] // types.shape(query)[1]


# --- Profiles ---------------------------------------------------------------------------------------------------------

_ATTENTION: Final = {"cirh.Attention": "forward", "cirh.AttentionGrad": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """The costs of one call of a kernel.

    Attributes:
        module: the kernel.
        flops: number of floating point operations.
        working_bytes: the most memory, at one moment, of values that it makes and of temporary memory.
        output_bytes: size of each result.
        choices: the chosen implementations of operations, each with its reason.
        output_sources: by result, the argument that it is a cast or a view of; None if it is not.
        own_results: the results, by number, whose memory no argument and no other result shares.
        shown_arguments: the arguments, by number, whose memory a result may share.
        beside: the results that are written over another value than a sum's earlier part. Where such a result is
            written to a send buffer instead, that value is held beside it.
    """

    module: ModuleOp
    flops: int
    working_bytes: int
    output_bytes: tuple[int, ...]
    choices: tuple[str, ...]
    output_sources: tuple[int | None, ...]
    own_results: frozenset[int]
    shown_arguments: frozenset[int]
    beside: frozenset[int]

    def working_bytes_without(self, freed: frozenset[int], overwritten: frozenset[int] = frozenset()) -> int:
        """The working bytes less the memory of arguments that the kernel frees after their last reader.

        Args:
            freed: the arguments, by number, that nothing reads after the call.
            overwritten: those of them that the kernel writes results over.
        """
        if not freed or not reuses_memory(self.module):
            return self.working_bytes
        return _working_bytes_without(self.module, freed, overwritten)

    @property
    def reuses_memory(self) -> bool:
        """Whether the kernel frees arguments after their last reader, and may write over them."""
        return reuses_memory(self.module)

    def overwritten(self, arguments: frozenset[int], results: frozenset[int]) -> tuple[int, ...]:
        """The arguments over which the kernel writes results, in ascending order.

        Args:
            arguments: those that it may write over, by number.
            results: the results that it may write over an argument, by number; others have memory of their own.
        """
        return _overwritten(self.module, arguments, results)


# Several parts of a compile profile the same kernels.
@lru_cache(maxsize=256)
def profile_kernel(text: str) -> KernelProfile:
    """The profile of the kernel with this text. Its module is shared: it must not be changed."""
    module = shared_module(text)
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    arguments: dict[SSAValue, int] = {argument: index for index, argument in enumerate(func_of(module).block.args)}
    results = return_of(module).operands
    written_over = memory_reuse(module, ops, results).written_over
    return KernelProfile(
        module=module,
        flops=sum(map(flops, ops)),
        working_bytes=_working_bytes_without(module, frozenset(), frozenset()),
        output_bytes=tuple(types.nbytes(value) for value in results),
        choices=tuple(dict.fromkeys(_choices(ops))),
        output_sources=tuple(_source(value, arguments) for value in results),
        own_results=results_of_their_own(module),
        shown_arguments=shown_arguments(module),
        beside=frozenset(
            index
            for index, value in enumerate(results)
            if value.owner in written_over and not _adds_to_sum(value.owner)
        ),
    )


def _choices(ops: Sequence[Operation]) -> Iterator[str]:
    for op in ops:
        way = _ATTENTION.get(op.name)
        if way is not None:
            choice = choose(site_of(op))
            yield f"attention {way}: {choice.kernel}, since {choice.reason}"


def operations_time(module: ModuleOp, machine: MachineModel) -> float:
    """Predicted seconds of a kernel that is run operation by operation."""
    return sum(machine.operation_time(op) for op in body_ops(module))


def loop_time(module: ModuleOp, machine: MachineModel) -> float:
    """Predicted seconds of a kernel that is run as one loop: those of the bytes of its arguments and results."""
    ends = [*func_of(module).block.args, *return_of(module).operands]
    return machine.operation_seconds + sum(map(types.nbytes, ends)) / machine.bytes_per_second


@lru_cache(maxsize=1024)
def _working_bytes_without(module: ModuleOp, freed: frozenset[int], overwritten: frozenset[int]) -> int:
    """The most bytes at one moment. A view takes no memory, and keeps the value that it is a view of.

    Args:
        module: the kernel.
        freed: the arguments, by number, whose bytes are subtracted after their last reader.
        overwritten: those of them that results are written over.
    """
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    results = return_of(module).operands
    reuse = memory_reuse(module, ops, results, overwritten)
    views = {value: op.operands[0] for op in ops if op.name in VIEWS and not _repeats(op) for value in op.results}
    # What is written over an operand or an argument takes its memory, as a view of it would.
    views.update((op.results[0], value) for op, value in (*reuse.written_over.items(), *reuse.joined_over.items()))
    shown: dict[SSAValue, SSAValue] = {}  # by view: the value that it is a view of
    last_read: dict[SSAValue, int] = {}
    for position, op in enumerate(ops):
        for operand in op.operands:
            if operand not in reuse.early:
                last_read[shown.get(operand, operand)] = position
        for value in op.results:
            if value in views:
                shown[value] = shown.get(views[value], views[value])
            if value in reuse.early:
                last_read[shown.get(value, value)] = position
    kept = {shown.get(value, value) for value in results}
    dying: dict[int, int] = {}
    for argument in (func_of(module).block.args[index] for index in freed):
        if argument not in kept and argument in last_read:
            dying[last_read[argument]] = dying.get(last_read[argument], 0) + types.nbytes(argument)
    placed: Counter[Operation] = Counter()  # by join: the bytes of the parts that have their places
    held = most = 0
    for position, op in enumerate(ops):
        for value in (value for value in op.results if value not in views):
            held += types.nbytes(value) - placed[op]
            if value not in kept:
                end = last_read.get(value, position)
                dying[end] = dying.get(end, 0) + types.nbytes(value)
        most = max(most, held + temporary_bytes(op))
        for value in op.results:
            if value in reuse.early and reuse.early[value].join.results[0] not in views:
                # The kernel gives a large value memory where it is written first.
                placed[reuse.early[value].join] += types.nbytes(value)
                held += types.nbytes(value)
                most = max(most, held)
        held -= dying.get(position, 0)
    return most


@lru_cache(maxsize=1024)
def _overwritten(module: ModuleOp, arguments: frozenset[int], results: frozenset[int]) -> tuple[int, ...]:
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    returned = return_of(module).operands
    over = memory_reuse(module, ops, returned, arguments).arguments
    # With a part of the arguments, a result that has memory of its own could take one that is meant for another.
    if any(index not in results and any(value is op.results[0] for op in over) for index, value in enumerate(returned)):
        return ()
    written = set(over.values())
    return tuple(index for index, argument in enumerate(func_of(module).block.args) if argument in written)


def _adds_to_sum(op: Operation | Block) -> bool:
    """Whether an operation adds a part to a sum, whose earlier parts were added in the same place."""
    return isinstance(op, Operation) and bool(terms_of_sum(op)) and op.operands[0].has_one_use()


def _repeats(op: Operation) -> bool:
    """Whether an operation writes out what a broadcast repeats, as no view has the elements in this shape."""
    if op.name != "cirh.Reshape":
        return False
    source = op.operands[0]
    merges = [size for size in types.shape(source) if size > 1] != [
        size for size in types.shape(op.results[0]) if size > 1
    ]
    return merges and isinstance(source.owner, Operation) and source.owner.name == "cirh.BroadcastInDim"


def _source(value: SSAValue, arguments: Mapping[SSAValue, int]) -> int | None:
    while value not in arguments:
        owner = value.owner
        if not isinstance(owner, Operation) or (owner.name != "cirh.Cast" and owner.name not in VIEWS):
            return None
        value = owner.operands[0]
    return arguments[value]


def profile_kernels(kernels: Iterable[plan_pb2.Kernel]) -> dict[int, KernelProfile]:
    """The profiles of a role's kernels, by number."""
    return {kernel.id: profile_kernel(kernel.cirh) for kernel in kernels}

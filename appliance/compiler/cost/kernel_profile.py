"""What can be told of one kernel of a plan: its arithmetic, its time, and the memory that it needs while it runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.cost.flops import VIEWS, flops
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.cost.temporaries import temporary_bytes
from cirh.calls.attention import choose
from cirh.dialect import types
from cirh.dialect.operations import Const, body_ops, func_of, return_of
from cirh.table.lookup import site_of
from cirh.text.parser import parse_module
from wsc.v1 import plan_pb2

_ATTENTION: Final = {"cirh.Attention": "forward", "cirh.AttentionGrad": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """One kernel, called once."""

    module: ModuleOp
    flops: int
    working_bytes: int  # the most that values made here, and temporary ones, take at one moment
    output_bytes: tuple[int, ...]
    choices: tuple[str, ...]  # between ways to do an operation, each with its reason
    output_sources: tuple[int | None, ...]  # the argument that an output is a cast or a view of, if it is one


@lru_cache(maxsize=256)  # several parts of a compile ask
def profile_kernel(text: str) -> KernelProfile:
    """The profile of the kernel that has this text; its module is for reading only."""
    module = parse_module(text)
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    arguments: dict[SSAValue, int] = {argument: index for index, argument in enumerate(func_of(module).block.args)}
    results = return_of(module).operands
    return KernelProfile(
        module=module,
        flops=sum(map(flops, ops)),
        working_bytes=_working_bytes(ops, results),
        output_bytes=tuple(types.nbytes(value) for value in results),
        choices=tuple(dict.fromkeys(_choices(ops))),
        output_sources=tuple(_source(value, arguments) for value in results),
    )


def _choices(ops: Sequence[Operation]) -> Iterator[str]:
    for op in ops:
        way = _ATTENTION.get(op.name)
        if way is not None:
            choice = choose(site_of(op))
            yield f"attention {way}: {choice.kernel}, since {choice.reason}"


def operations_time(module: ModuleOp, machine: MachineModel) -> float:
    """Predicted seconds, operation by operation."""
    return sum(machine.operation_time(op) for op in body_ops(module))


def loop_time(module: ModuleOp, machine: MachineModel) -> float:
    """Predicted seconds in one pass: what it reads and writes."""
    ends = [*func_of(module).block.args, *return_of(module).operands]
    return machine.operation_seconds + sum(map(types.nbytes, ends)) / machine.bytes_per_second


def _working_bytes(ops: Sequence[Operation], results: Sequence[SSAValue]) -> int:
    """Views take no memory, and keep what they show."""
    shown: dict[SSAValue, SSAValue] = {}  # a view -> what it is a view of
    last_read: dict[SSAValue, int] = {}
    for position, op in enumerate(ops):
        for operand in op.operands:
            last_read[shown.get(operand, operand)] = position
        if op.name in VIEWS:
            shown.update(dict.fromkeys(op.results, shown.get(op.operands[0], op.operands[0])))
    kept = {shown.get(value, value) for value in results}
    dying: dict[int, int] = {}
    held = most = 0
    for position, op in enumerate(ops):
        for value in op.results if op.name not in VIEWS else ():
            held += types.nbytes(value)
            if value not in kept:
                end = last_read.get(value, position)
                dying[end] = dying.get(end, 0) + types.nbytes(value)
        most = max(most, held + temporary_bytes(op))
        held -= dying.get(position, 0)
    return most


def _source(value: SSAValue, arguments: Mapping[SSAValue, int]) -> int | None:
    while value not in arguments:
        owner = value.owner
        if not isinstance(owner, Operation) or (owner.name != "cirh.Cast" and owner.name not in VIEWS):
            return None
        value = owner.operands[0]
    return arguments[value]


def profile_kernels(kernels: Iterable[plan_pb2.Kernel]) -> dict[int, KernelProfile]:
    """Profiles of a role's kernels, by number."""
    return {kernel.id: profile_kernel(kernel.cirh) for kernel in kernels}

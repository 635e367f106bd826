"""The values of the batch that are gathered: each wafer, or MemoryX, needs the rows of all wafers."""

from collections.abc import Iterator

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.sharding.parts import GATHERED
from appliance.compiler.sharding.propagate import Sharding
from appliance.drawing.number_text import bytes_text
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import body_ops, func_of
from waferbox.cirh.modules.graph import signature


def gathered_values(module: ModuleOp, sharding: Sharding) -> dict[SSAValue, Operation]:
    """By reduced value that gathers rows: the operation that places a wafer's rows, with its reader's location."""
    number = signature(module).wafers
    if number is None:
        return {}
    wafers = func_of(module).block.args[number]
    found: dict[SSAValue, Operation] = {}
    for op in body_ops(module):
        # Only `Gathers` adds rows by the number of the wafer.
        if op.name == "aten.index_add" and op.operands[1] is wafers:
            for value in _reduced_behind(op.results[0], sharding):
                found.setdefault(value, op)
    return found


def reason_of(op: Operation) -> str:
    """The reason for which an operation of `gathered_values` gathers."""
    reason = op.attributes.get(GATHERED)
    return reason.data if isinstance(reason, StringAttr) else ""


def _reduced_behind(value: SSAValue, sharding: Sharding) -> Iterator[SSAValue]:
    """The reduced values that a partial value reaches through linear operations; mostly it is one itself."""
    if value in sharding.reduced:
        yield value
        return
    for result in (result for use in value.uses for result in use.operation.results):
        if sharding.placements[result].is_partial:
            yield from _reduced_behind(result, sharding)


def refuse_gathers(module: ModuleOp, sharding: Sharding) -> None:
    """Raises CompileError if a value is gathered. The message names all lines."""
    found = gathered_values(module, sharding)
    if found:
        lines = dict.fromkeys(
            f"{source_of(op)}: {reason_of(op)} ({bytes_text(types.nbytes(value))})" for value, op in found.items()
        )
        raise CompileError(
            f"rows of all wafers are needed, and sharding is strict: {'; '.join(lines)}. Write it without mixing "
            "different samples, use num_csx=1, or let them be gathered: "
            "cstorch.backends.csx.performance.strict_sharding = False"
        )

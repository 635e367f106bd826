"""Copies values that pass through a step: a state that becomes another one, an input or a constant that is an output.

Each gets an operation of its own, so that every result of a step is made by an operation, whose role sends or stores
it. A state that is an output needs no copy: it is sent from its buffer.
"""

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.dialect.operations import Const, func_of, return_of
from waferbox.cirh.modules.graph import signature


def copy_passed_values(module: ModuleOp) -> bool:
    """Inserts a copy (a Reshape to the same shape) before such results. Returns whether there were any."""
    names = signature(module)
    arguments, end = func_of(module).block.args, return_of(module)
    states = {arguments[state.argument] for state in names.states}
    copies: dict[SSAValue, SSAValue] = {}

    def copy(result: int) -> None:
        value = end.operands[result]
        if isinstance(value.owner, Block | Const):
            if value not in copies:
                (copies[value],) = Rewriter(end).emit("cirh.Reshape", [value], types=[value.type])  # type: ignore[list-item]
            end.operands[result] = copies[value]

    for state in names.states:
        if state.result is not None and end.operands[state.result] is not arguments[state.argument]:
            copy(state.result)
    for output in names.outputs:
        if end.operands[output.result] not in states:
            copy(output.result)
    return bool(copies)

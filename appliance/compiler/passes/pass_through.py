"""Values that leave a step as they came: a state that becomes another one, an input or a constant that is an output.

Each is given an operation of its own, so that every result of a step is made by somebody: the place that it is sent or
copied from. States that are outputs need none: they are sent from where they lie.
"""

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.dialect.operations import Const, func_of, return_of
from waferbox.cirh.modules.graph import signature


def copy_what_passes_through(module: ModuleOp) -> bool:
    """Puts a copy (a Reshape to the same shape) before such results. Whether there were any."""
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

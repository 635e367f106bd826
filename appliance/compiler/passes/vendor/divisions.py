"""Integers that are divided by `//`, and what `%` leaves of them: rounded down as in torch.

The vendor's client writes Div, which rounds to zero: of negative numbers that is another. What the operation was in
torch is in its location.
"""

from typing import Final

from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.rewriter import Rewriter
from cirh.dialect import types
from cirh.dialect.locations import source_of
from cirh.dialect.operations import body_ops

_ROUND_DOWN: Final = ("aten::floor_divide", "aten::remainder")


def replace_floor_divisions(module: ModuleOp) -> bool:
    """Rewrites every Div of integers that torch rounds down. Whether there were any."""
    changed = False
    for op in body_ops(module):
        if op.name != "cirh.Div" or types.dtype(op.results[0]).is_floating_point:
            continue
        if source_of(op).op in _ROUND_DOWN:
            rewriter = Rewriter(op)
            rewriter.replace(rewriter.emit("aten.floor_divide", list(op.operands)))
            changed = True
    return changed

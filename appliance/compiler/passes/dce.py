"""Dead code elimination."""

from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.rewriter import erase
from waferbox.cirh.dialect.operations import body_ops


def eliminate_dead_code(module: ModuleOp) -> bool:
    """Drops operations on which no result of the step depends. Returns whether there were any."""
    # All operations are pure, and users come after makers: one walk backwards finds all dead code.
    changed = False
    for op in reversed(body_ops(module)):
        if not any(result.uses for result in op.results):
            erase(op)
            changed = True
    return changed

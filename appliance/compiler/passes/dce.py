"""Dead code: what no result of the step depends on."""

from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.rewriter import erase
from waferbox.cirh.dialect.operations import body_ops


def eliminate_dead_code(module: ModuleOp) -> bool:
    """Drops operations whose results nothing reads; all operations are pure. Whether there were any."""
    changed = False
    for op in reversed(body_ops(module)):
        if not any(result.uses for result in op.results):
            erase(op)
            changed = True
    return changed

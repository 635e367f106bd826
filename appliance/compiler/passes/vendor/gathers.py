"""torch.gather of the vendor's client, as torch's: it has a sharding rule of its own.

The client writes it as the Gather that takes whole rows; the shape of the result tells them apart: that of the indices.
"""

import torch
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.rewriter import Rewriter
from cirh.calls.picking import picks_elements
from cirh.dialect import types
from cirh.dialect.attributes import attrs
from cirh.dialect.operations import body_ops
from cirh.table.lookup import site_of


def replace_gathers(module: ModuleOp) -> bool:
    """Rewrites every Gather that picks single elements. Whether there were any."""
    changed = False
    for op in body_ops(module):
        if op.name == "cirh.Gather" and picks_elements(site_of(op)):
            rewriter = Rewriter(op)
            source, indices = op.operands
            long = types.tensor_type(types.shape(indices), torch.int64)
            (places,) = rewriter.emit("cirh.Cast", [indices], types=[long])
            place = {"dim": attrs(op).get("axis", 0), "sparse_grad": False}
            rewriter.replace(rewriter.emit("aten.gather", [source, places], place))
            changed = True
    return changed

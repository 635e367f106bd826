"""Norms of halves: computed in float32 and rounded once.

So torch's kernels for halves do it inside; but those of a CPU keep statistics in half, where the tracer, and every
other device, has them in float32, and add up the gradients of weights in half.
"""

import torch
from torch import fx

from cirh.dialect import types
from cirh.table.lookup import spec
from cstorch.lowering.context import Lowering, Result, Rule
from cstorch.lowering.verbatim import verbatim

HALVES = frozenset({torch.float16, torch.bfloat16})


def in_float32(rule: Rule) -> Rule:
    """The rule on float32 copies of operands that are halves; its results get the types that torch says."""

    def with_copies(lowering: Lowering, node: fx.Node) -> Result:
        given = {argument: lowering.values[argument] for argument in node.all_input_nodes}
        halves = [argument for argument in given if types.dtype(lowering.value(argument)) in HALVES]
        if not halves:
            return rule(lowering, node)
        lowering.values.update(
            {argument: lowering.cast(lowering.value(argument), torch.float32) for argument in halves}
        )
        try:
            results = rule(lowering, node)
        finally:
            lowering.values.update(given)
        assert isinstance(results, tuple)
        expected = node.meta["val"]
        return tuple(
            value if tensor is None else lowering.cast(value, tensor.dtype)
            for tensor, value in zip(expected, results, strict=False)
        )

    return with_copies


@in_float32
def norm(lowering: Lowering, node: fx.Node) -> Result:
    """ATen's operation of that name."""
    return verbatim(lowering, node, spec(str(node.target).removesuffix(".default")))

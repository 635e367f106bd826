"""Values that are the same in every step: those made of constants alone."""

import math
from typing import Final

import torch
from xdsl.ir import Block, Operation, SSAValue

from cirh.dialect import types
from cirh.dialect.operations import Const
from cirh.execution.kernel import Kernel
from cirh.modules.graph import extract
from cirh.table.lookup import TORCH_ERRORS, spec

_MOST_OPERATIONS: Final = 32
# Of all results that are computed for one module: sixteen masks of two thousand tokens.
_MOST_ELEMENTS: Final = 1 << 26


class KnownValues:
    """Computes such values of one module, as long as that is little work."""

    def __init__(self) -> None:
        self._left = _MOST_ELEMENTS
        self._found: dict[SSAValue, torch.Tensor | None] = {}

    def get(self, value: SSAValue) -> torch.Tensor | None:
        """The value, or None if it depends on the step or would be too much to compute. Read it only."""
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def _compute(self, value: SSAValue) -> torch.Tensor | None:
        needed: set[Operation] = set()
        stack = [value]
        while stack:
            owner = stack.pop().owner
            if isinstance(owner, Block) or len(needed) > _MOST_OPERATIONS:
                return None
            if not isinstance(owner, Const) and spec(owner.name).random:
                return None
            if owner not in needed:
                needed.add(owner)
                stack.extend(owner.operands)
        self._left -= sum(math.prod(types.shape(result)) for op in needed for result in op.results)
        block = value.owner.parent_block() if isinstance(value.owner, Operation) else None
        if self._left < 0 or block is None:
            return None
        try:
            return Kernel(extract([op for op in block.ops if op in needed], [], [value]))([])[0]
        except TORCH_ERRORS:
            # An index that does not exist, say: the step itself will tell.
            return None

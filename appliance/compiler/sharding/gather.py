"""All-gather: every wafer gets the whole of a value of which it has a part.

Each wafer writes its part into zeros of the size of the whole, at the place that its number says. The sum of these is
the whole: SwarmX adds them up and sends the sum back, as it does with every partial value. Zeros change no number.
"""

from collections.abc import Callable

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.sharding.rules.placement import Placement
from cirh.dialect import types
from cirh.dialect.operations import func_of


class Gathers:
    """Whole values, each made behind the one that is cut, and once for all who read it."""

    def __init__(self, module: ModuleOp, num_parts: int, wafers: Callable[[], SSAValue]) -> None:
        """wafers: gives the argument of wafer numbers."""
        self._module = module
        self._num_parts = num_parts
        self._wafers = wafers
        self._made: dict[tuple[SSAValue, Placement], SSAValue] = {}

    def whole(self, value: SSAValue, cut: Placement, reader: Operation) -> SSAValue:
        """The value that is partial, and whole when it is reduced. `reader` is the first that asked for it."""
        made = self._made.get((value, cut))
        # What nothing reads any more was dropped.
        if made is None or made.owner.parent_block() is None:
            made = self._made[value, cut] = self._make(value, cut, reader)
        return made

    def _make(self, value: SSAValue, cut: Placement, reader: Operation) -> SSAValue:
        owner = value.owner
        behind = func_of(self._module).block.first_op if isinstance(owner, Block) else owner.next_op
        assert behind is not None, "a value is read by something"
        rewriter = Rewriter(behind, reader.location)
        shape, dtype = types.info(value)
        block = shape[cut.dim] // (cut.outer * self._num_parts)
        apart = (*shape[: cut.dim], cut.outer, self._num_parts, block, *shape[cut.dim + 1 :])
        (parts,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(apart, dtype)])
        zeros = rewriter.splat(0, apart, dtype)
        (placed,) = rewriter.emit("aten.index_add", [zeros, self._wafers(), parts], {"dim": cut.dim + 1})
        return rewriter.emit("cirh.Reshape", [placed], types=[types.tensor_type(shape, dtype)])[0]

"""Makes kernels: the same operations with local shapes, which are those of one part of the batch.

Sizes in attributes are replaced as the sharding rules say. The type of each result is inferred anew and must be the
local type of its placement, which checks the rules.
"""

from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import refuse
from appliance.compiler.sharding.propagate import Sharding
from appliance.compiler.sharding.rules.rule import ONE_WAFER, Placement
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, SplatAttr, attrs
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.spec import Typed
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.table.lookup import spec


class Localiser:
    """Makes kernels from the wafers' operations."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def type_of(self, value: SSAValue) -> AnyTensorType:
        """The local type of a value."""
        return self._local(value, self._sharding.placements[value])

    def kernel(self, ops: Iterable[Operation], inputs: Sequence[SSAValue], outputs: Sequence[SSAValue]) -> ModuleOp:
        """A module from local inputs to local outputs."""
        builder = GraphBuilder()
        values = {value: builder.argument(self.type_of(value)) for value in inputs}
        for op in ops:
            outcome = self._sharding.outcomes[op]
            operands = [
                self._operand(builder, values, operand, want)
                for operand, want in zip(op.operands, outcome.operands, strict=True)
            ]
            given = [self.type_of(result) for result in op.results]
            # Types are given only to operations that cannot infer them; the others are checked below.
            typed = spec(op.name).typed is not Typed.NEVER
            attributes: dict[str, AttrValue] = {**attrs(op), **outcome.attributes}
            results = builder.op(op.name, operands, attributes, op.location, types=given if typed else None)
            for result, local, expected in zip(op.results, results, given, strict=True):
                if local.type != expected:
                    made, wanted = types.type_text(local), types.type_text(expected)
                    raise refuse(op, f"makes {made} on one wafer instead of {wanted}", ONE_WAFER)
                values[result] = local
        return builder.finish([(values[value], None) for value in outputs])

    def _operand(
        self,
        builder: GraphBuilder,
        values: Mapping[SSAValue, SSAValue],
        operand: SSAValue,
        want: Placement,
    ) -> SSAValue:
        if isinstance(operand.owner, Const):
            return self._constant(builder, operand.owner, want)
        return values[operand]

    def _constant(self, builder: GraphBuilder, constant: Const, want: Placement) -> SSAValue:
        if not want.is_sharded or self._sharding.num_parts == 1:
            return builder.constant(constant.value)
        assert isinstance(constant.value, SplatAttr), "propagation refuses others"
        local = self._local(constant.results[0], want)
        value = constant.value.tensor().reshape(-1)[:1].item()
        return builder.splat(value, types.shape(local), types.dtype(local))

    def _local(self, value: SSAValue, placement: Placement) -> AnyTensorType:
        shape = placement.local_shape(types.shape(value), self._sharding.num_parts)
        return types.tensor_type(shape, types.dtype(value))

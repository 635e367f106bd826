"""Changes operations of a module in place. Also: the layer of an operation, and ATen's numbers of reductions."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from xdsl.dialects.builtin import LocationAttr
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect.attributes import AttrValue, ConstantAttr, attribute, splat
from waferbox.cirh.dialect.operations import Const, operation_class
from waferbox.cirh.dialect.types import AnyTensorType, tensor_type
from waferbox.cirh.table.lookup import make_site, result_types

# --- Layers -----------------------------------------------------------------------------------------------------------

_UP_TO_INDEX = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")
# The number of names that make a layer if the path has no list index.
_DEPTH = 2


def layer_of(module_path: str) -> str:
    """The layer of a module path; "" for operations outside all modules."""
    indexed = _UP_TO_INDEX.match(module_path)
    return indexed.group(1) if indexed else ".".join(module_path.split(".")[:_DEPTH])


# --- ATen's numbers of the reductions of a loss -----------------------------------------------------------------------

NONE: Final = 0
MEAN: Final = 1
TOTAL: Final = 2

# --- Rewriting --------------------------------------------------------------------------------------------------------


def erase(op: Operation) -> None:
    """Removes an operation whose results nothing reads."""
    op.detach()  # type: ignore[no-untyped-call]
    op.erase()


class Rewriter:
    """Inserts operations before `op`, with its source location unless another is given, and replaces `op` by them."""

    def __init__(self, op: Operation, location: LocationAttr | None = None) -> None:
        self._op = op
        self._location = op.location if location is None else location
        self.made: list[Operation] = []

    def emit(
        self,
        name: str,
        operands: Sequence[SSAValue],
        attributes: Mapping[str, AttrValue] | None = None,
        *,
        types: Sequence[AnyTensorType] | None = None,
    ) -> tuple[SSAValue, ...]:
        """Inserts an operation. Returns its results."""
        plain = attributes or {}
        created = operation_class(name).create(
            operands=operands,
            result_types=result_types(make_site(name, operands, plain, types)),
            attributes={key: attribute(value) for key, value in plain.items()},
            location=self._location,
        )
        self._insert(created)
        return tuple(created.results)

    def splat(self, value: float, shape: Sequence[int], dtype: torch.dtype) -> SSAValue:
        """Inserts a constant of equal elements."""
        return self.constant(splat(value, tensor_type(shape, dtype)))

    def constant(self, constant: ConstantAttr) -> SSAValue:
        """Inserts a constant."""
        created = Const.create(result_types=[constant.type], attributes={"value": constant}, location=self._location)
        self._insert(created)
        return created.results[0]

    def replace(self, values: Sequence[SSAValue]) -> None:
        """Removes the old operation, and makes the readers of its results read these values."""
        for old, new in zip(self._op.results, values, strict=True):
            old.replace_all_uses_with(new)
        erase(self._op)

    def _insert(self, created: Operation) -> None:
        block = self._op.parent_block()
        assert block is not None
        block.insert_op_before(created, self._op)
        self.made.append(created)

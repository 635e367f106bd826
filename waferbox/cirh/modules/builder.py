"""Building a module operation by operation."""

from collections.abc import Mapping, Sequence

import torch
from xdsl.dialects.builtin import DictionaryAttr, IntegerAttr, LocationAttr, ModuleOp, StringAttr, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue, ConstantAttr, attribute, dense, splat
from waferbox.cirh.dialect.locations import UNKNOWN, location, source_of_location
from waferbox.cirh.dialect.operations import Const, Return, make_module, operation_class
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import AnyTensorType, tensor_type
from waferbox.cirh.table.lookup import make_site, result_types

# Names in the attribute dictionaries of arguments and results.
STATE_NAME, ALIAS, INPUT_NAME, OUTPUT_NAME = "tf.resource_name", "tf.aliasing_output", "cs.input_name", "cs.output_name"
# Marks the argument that holds the numbers of the wafers; its value is how many there are.
WAFERS = "cs.wafers"
Location = LocationAttr | Source | None


def _location(loc: Location) -> LocationAttr:
    if loc is None:
        return UNKNOWN
    return location(loc) if isinstance(loc, Source) else loc


class GraphBuilder:
    """A builder of a module's one function. Constants come first in it, and equal ones become one operation."""

    def __init__(self) -> None:
        self._block = Block()
        self._argument_attributes: list[dict[str, Attribute]] = []
        self._constants: dict[ConstantAttr, Const] = {}
        self._body: list[Operation] = []
        self._finished = False

    def argument(
        self, type: AnyTensorType, *, state: str | None = None, input: str | None = None, loc: Location = None
    ) -> SSAValue:
        """Adds an argument of the function: a state, an input, or, in a kernel, an argument without a name."""
        argument = self._block.insert_arg(type, len(self._block.args))
        argument.location = _location(loc)
        names = {STATE_NAME: state, INPUT_NAME: input}
        self._argument_attributes.append({k: StringAttr(name) for k, name in names.items() if name is not None})
        return argument

    def op(
        self,
        name: str,
        operands: Sequence[SSAValue],
        attributes: Mapping[str, AttrValue] | None = None,
        loc: Location = None,
        *,
        types: Sequence[AnyTensorType] | None = None,
        annotations: Mapping[str, Attribute] | None = None,
    ) -> tuple[SSAValue, ...]:
        """Appends an operation and returns its results.

        Result types are inferred. `types` gives them to operations whose meaning depends on them: Cast (the element
        type), Reshape and BroadcastInDim (the shape) require it; Reduce of kind ARGMAX and Arange may have it.
        `annotations` are attributes with a dot in their name. Raises CirhError for an impossible operation.
        """
        where = _location(loc)
        plain = attributes or {}
        try:
            results = result_types(make_site(name, operands, plain, types))
        except CirhError as error:
            raise with_source(error, where) from None
        operation = operation_class(name).create(
            operands=operands,
            result_types=results,
            attributes={**{k: attribute(v) for k, v in plain.items()}, **(annotations or {})},
            location=where,
        )
        self._body.append(operation)
        return tuple(operation.results)

    def append(self, operation: Operation) -> None:
        """Appends an operation that has its result types and is in no block."""
        self._body.append(operation)

    def constant(self, value: ConstantAttr, loc: Location = None) -> SSAValue:
        """A constant."""
        existing = self._constants.get(value)
        if existing is None:
            existing = Const.create(result_types=[value.type], attributes={"value": value}, location=_location(loc))
            self._constants[value] = existing
        return existing.results[0]

    def splat(
        self, value: bool | int | float, shape: Sequence[int], dtype: torch.dtype, loc: Location = None
    ) -> SSAValue:
        """A constant of one value."""
        return self.constant(splat(value, tensor_type(shape, dtype)), loc)

    def dense(self, tensor: torch.Tensor, loc: Location = None) -> SSAValue:
        """A constant with the elements of a CPU tensor."""
        return self.constant(dense(tensor), loc)

    def finish(
        self, outputs: Sequence[tuple[SSAValue, str | None]], aliases: Mapping[int, int] | None = None
    ) -> ModuleOp:
        """The module, after which nothing can be added.

        Args:
            outputs: the results with their names; None for a state's next value, or a kernel's result.
            aliases: argument index -> index of the result that replaces the argument after the step.
        """
        assert not self._finished, "finish() was called already"
        self._finished = True
        for argument, result in (aliases or {}).items():
            self._argument_attributes[argument][ALIAS] = IntegerAttr(result, i64)
        self._block.add_ops([*self._constants.values(), *self._body, Return.create(operands=[v for v, _ in outputs])])
        return make_module(
            self._block,
            [DictionaryAttr(a) for a in self._argument_attributes],
            [DictionaryAttr({} if name is None else {OUTPUT_NAME: StringAttr(name)}) for _, name in outputs],
        )


def with_source(error: CirhError, where: LocationAttr) -> CirhError:
    """A copy of the error whose message begins with the source location, if that is known."""
    source = source_of_location(where)
    return CirhError(f"{source}: {error}") if source.file or source.module else error

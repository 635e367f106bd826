"""The properties of an ATen call that tracing needs: of the operator, by its schema and tags, and of its operands."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import META, LazyTensor, is_device

aten = torch.ops.aten

# Operations whose result depends on values, or moves to the host, but that have no tag for it.
_READS = frozenset({aten.is_nonzero.default, aten.item.default, aten._pin_memory.default})
# Operations that read the shape and the type of their first argument, and not its value.
SHAPE_ONLY = frozenset(
    {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
    | {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
    | {aten.new_empty_strided.default}
)
# These, and those that draw random numbers for a tensor of that shape and type.
LIKE = (
    SHAPE_ONLY
    | {aten.rand_like.default, aten.rand_like.generator, aten.randn_like.default, aten.randn_like.generator}
    | {aten.randint_like.default, aten.randint_like.generator}
    | {aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype}
)
_DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The properties of an ATen operator.

    name: The qualified name, such as "aten::addmm".
    reads_values: Whether the result depends on values that must be known, or moves to the host.
    written, written_names: The schema positions, and names, of the arguments that it writes to.
    views: Whether a result aliases an argument.
    reshapes: Whether it changes the shape of an argument in place (t_, unsqueeze_).
    random: Whether it may draw random numbers.
    layout: The layout of the tensors that it is for; torch.strided for plain ones.
    """

    name: str
    reads_values: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    views: bool
    reshapes: bool
    random: bool
    layout: torch.layout


@functools.cache
def operator(func: OpOverload) -> Operator:
    """Returns the properties of an operator."""
    schema = func._schema
    tags = frozenset(func.tags)
    written = tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Operator(
        name=schema.name,
        # aten.index.Tensor is tagged, but its shape depends on values only where a mask is the index.
        reads_values=func in _READS or (func is not aten.index.Tensor and bool(tags & _DATA_DEPENDENT)),
        written=written,
        written_names=tuple(schema.arguments[position].name for position in written),
        views=any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns),
        reshapes=torch.Tag.inplace_view in tags,
        random=torch.Tag.nondeterministic_seeded in tags,
        layout=_layout(schema.name),
    )


def _layout(name: str) -> torch.layout:
    if name.startswith("aten::"):
        if "nested" in name or "jagged" in name:
            return torch.jagged
        if "sparse" in name or "_coalesce" in name:
            return torch.sparse_coo
    return torch.strided


def draws_numbers(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; arguments of some random operations switch that off."""
    if not operator(func).random:
        return False
    given = arguments_by_name(func, args, kwargs)
    return given.get("train") is not False and given.get("training") is not False and given.get("dropout_p") != 0


def arguments_by_name(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by their names in the schema, with defaults."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


# --- Operands ---------------------------------------------------------------------------------------------------------

# Operations that take CPU tensors with dimensions together with device tensors.
TAKES_CPU_TENSORS = frozenset(
    {aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default, aten.index.Tensor, aten.index_put_.default}
    | {aten.index_put.default, aten._index_put_impl_.default}
)


def as_meta(argument: Any) -> Any:
    """Returns an argument in the form for the meta kernel."""
    if isinstance(argument, LazyTensor):
        return argument._handle.meta
    if isinstance(argument, torch.Tensor):
        return argument.to(META)
    if isinstance(argument, (list, tuple)):
        return [as_meta(item) for item in argument]
    if isinstance(argument, torch.device):
        return META
    if isinstance(argument, torch.Generator):
        return None
    return argument


def is_whole(meta: torch.Tensor, cell: Cell) -> bool:
    """Whether a tensor is its whole cell, in the cell's layout."""
    return tuple(meta.shape) == cell.shape and meta.is_contiguous() and meta.storage_offset() == 0


def moves_to_host(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result of a call is not on the device: with `device="cpu"`, or of `copy_` into a CPU tensor."""
    device = kwargs.get("device")
    if device is not None:
        return not is_device(device)
    return func is aten.copy_.default and not isinstance(args[0], LazyTensor)

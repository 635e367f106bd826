"""What the tracer needs to know of an ATen operator, read from its schema and tags."""

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# Ops whose result depends on values, or reaches the host, but that carry no tag that says so.
_READS = frozenset({aten.is_nonzero.default, aten.item.default, aten._pin_memory.default})
_DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """`name` is like "aten::addmm". `written` holds the schema positions of the arguments that it writes to; `views`
    says that results alias an argument; `reshapes` that it changes an argument's shape in place (t_, unsqueeze_);
    `random` that it may draw random numbers."""

    name: str
    reads_values: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    views: bool
    reshapes: bool
    random: bool


@functools.cache
def operator(func: OpOverload) -> Operator:
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
    )

"""The sources of operations that can fail for the values of their operands, such as a label that is out of range.

Kernels have no sources, as layers that are alike share them. A plan names those of a run's operations apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.ir import Operation

from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.types import info
from waferbox.cirh.table.lookup import runtime_operands, spec

VERBATIM: Final = "aten."  # what the names of torch's own operations begin with
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSource:
    """The source of an operation of a kernel.

    Attributes:
        operation: its name, such as "cirh.CrossEntropy".
        source: the traced operation and the line of the script, such as "aten::embedding at train.py:31".
    """

    operation: str
    source: str


def can_fail(operation: Operation) -> bool:
    """Whether an operation may fail for the values of its operands.

    It reads integers, or is one of torch's own that does not compute element by element.
    """
    if isinstance(operation, Const):
        return False
    is_whole = operation.name.startswith(VERBATIM) and not spec(operation.name).pointwise
    return is_whole or any(info(operand).dtype in INTEGERS for operand in runtime_operands(operation))


def sources_of(operations: Iterable[Operation]) -> tuple[OperationSource, ...]:
    """Returns the sources of those operations that can fail, in order."""
    sources = ((operation.name, source_of(operation)) for operation in operations if can_fail(operation))
    return tuple(
        OperationSource(operation=name, source=f"{source.op or name} at {source.place or 'an unknown line'}")
        for name, source in sources
    )


def source_text(sources: Sequence[OperationSource], operation: str, number: int, count: int) -> str:
    """Returns the source of an operation of a kernel.

    Args:
        sources: those of the kernel's operations that can fail.
        operation: the name of the operation.
        number: its number among those of this name, from 0.
        count: how many the kernel has of this name: a kernel that computes rows in slices has several for one source.
    """
    named = [each.source for each in sources if each.operation == operation]
    if len(named) == count:
        return named[number]
    return " or ".join(dict.fromkeys(named)) or operation

"""Finds the first operation of a step that computes otherwise than plain PyTorch.

The step's program is run on the CPU with the states and the batch that plain PyTorch had. Each of its values is looked
for among all tensors that PyTorch made in the step, by their moments. An optimised or decomposed operation has values
that PyTorch never makes; so a step before, in which both agree, says which values are to be found.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from waferbox.checked_run.moments import is_among, moments
from waferbox.checked_run.record import INPUT, StepObserved
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const, body_ops, func_of
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import dtype, info
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.table.lookup import build, runtime_operands, spec
from waferbox.cirh.text.parser import parse_module

COUNTER: Final = "state.random.counter"
# Larger steps are not run here: all their values are kept.
MOST_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first operation that differs.

    Attributes:
        source: its line, layer and traced operation; None: the whole program computes what PyTorch does, and the
            cluster something else.
    """

    source: Source | None


def first_difference(
    text: str, folder: Path, differing: StepObserved, agreeing: StepObserved | None
) -> FirstDifference | None:
    """Returns the first operation that differs in a step; None: it cannot be found.

    Args:
        text: the step as CIRH.
        folder: the folder of the record.
        differing: the step in which values differ.
        agreeing: a step before, in which none do; None: there is none.
    """
    module = parse_module(text)
    if sum(_nbytes(value) for op in body_ops(module) for value in op.results) > MOST_BYTES:
        return None
    found = _found_operations(module, folder, differing)
    if found is None:
        return None
    operations = [op for op in body_ops(module) if id(op) in found]
    expected = _found_operations(module, folder, agreeing) if agreeing is not None else _leading(module, found)
    if expected is None:
        return None
    first = next((op for op in operations if expected.get(id(op)) and not found[id(op)]), None)
    if first is not None:
        return FirstDifference(source=source_of(first))
    return FirstDifference(source=None) if agreeing is not None else None


def _found_operations(module: ModuleOp, folder: Path, observed: StepObserved) -> dict[int, bool] | None:
    """Says of each operation with a floating point result whether PyTorch made the same; None: the step cannot run."""
    kept = load_file(folder / observed.path)
    known = kept["moments"]
    values = argument_tensors(module, kept, observed.counter)
    if values is None:
        return None
    found: dict[int, bool] = {}
    with torch.no_grad():
        for op in body_ops(module):
            for tensor in run_operation(op, values):
                if not isinstance(op, Const) and tensor.is_floating_point() and tensor.numel():
                    found[id(op)] = found.get(id(op), True) and is_among(moments(tensor), known)
    return found


def argument_tensors(
    module: ModuleOp, kept: Mapping[str, torch.Tensor], counter: int
) -> dict[SSAValue, torch.Tensor] | None:
    """Returns the tensors of the arguments of a step, from a record; None: the record lacks one."""
    arguments = list(func_of(module).block.args)
    meaning = signature(module)
    tensors: dict[int, torch.Tensor | None] = {state.argument: kept.get(state.name) for state in meaning.states}
    tensors |= {each.argument: kept.get(f"{INPUT}{number}") for number, each in enumerate(meaning.inputs)}
    tensors |= {state.argument: torch.tensor(counter) for state in meaning.states if state.name == COUNTER}
    if meaning.wafers is not None:
        tensors[meaning.wafers] = torch.zeros(1, dtype=dtype(arguments[meaning.wafers]))
    values: dict[SSAValue, torch.Tensor] = {}
    for index, argument in enumerate(arguments):
        tensor = tensors.get(index)
        if tensor is None or tensor.dtype is not dtype(argument):
            return None
        values[argument] = tensor
    return values


def run_operation(op: Operation, values: dict[SSAValue, torch.Tensor]) -> list[torch.Tensor]:
    """Runs an operation of a step on the CPU, and adds its results to the values.

    Returns:
        The results, without those that the step does not use, such as the gradient of a batch.
    """
    if isinstance(op, Const):
        made = [op.value.tensor()]
    else:
        result = build(op).function(*(values[operand] for operand in runtime_operands(op)))
        made = list(result) if spec(op.name).results != 1 else [result]
    used: dict[SSAValue, torch.Tensor] = {
        value: tensor for value, tensor in zip(op.results, made, strict=True) if tensor is not None
    }
    values.update(used)
    return list(used.values())


def _leading(module: ModuleOp, found: Mapping[int, bool]) -> dict[int, bool]:
    """Returns the operations that are to be found, without a step to compare with.

    An operation that PyTorch does otherwise leads to others that are found; one that is wrong does not.
    """
    leads: dict[int, bool] = {}
    for op in reversed(body_ops(module)):
        later = [use.operation for value in op.results for use in value.uses]
        leads[id(op)] = found.get(id(op), False) or any(leads.get(id(other), False) for other in later)
    return {number: found[number] or not leads[number] for number in found}


def _nbytes(value: SSAValue) -> int:
    type = info(value)
    return math.prod(type.shape) * type.dtype.itemsize

"""Gradients that travel in half: each wafer rounds its part once, behind the last of its micro-batches.

What MemoryX computes with is the sum, cast back to float32. A SwarmX node that adds does so in float32, and rounds its
sum once, so that every link carries halves: `docs/compiler.md` says what that loses. Only gradients of weights are
rounded, by what the step does with them and not by name: a sum over samples of the backward pass that no wafer waits
for, and of which the next value of a weight, with as many elements, is made.
"""

import torch
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.core.target import ExecutionStrategy, Half, Target
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.shards import elements
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.source import Source

_FLAG = "cstorch.backends.csx.precision.half_gradients"
_DTYPES = {Half.FLOAT16: torch.float16, Half.BFLOAT16: torch.bfloat16}


def check_half_gradients(target: Target) -> None:
    """CompileError if gradients are to travel in half where none travel, or where a half saves nothing."""
    if target.precision is None or not target.precision.half_gradients:
        return
    if target.execution_strategy is ExecutionStrategy.PIPELINE:
        raise CompileError(
            "in layer pipelined mode gradients are added up and used on the one wafer, and do not travel: leave "
            f"{_FLAG} False, or use the execution strategy weight_streaming"
        )
    if target.precision.half not in _DTYPES:
        raise CompileError(
            "cbfloat16 is emulated by float32 tensors with rounded values, so that gradients in it would travel as "
            f'float32: leave {_FLAG} False, or use cstorch.amp.set_half_dtype("bfloat16") or "float16"'
        )


def round_gradients(cut: Cut, target: Target) -> frozenset[SSAValue]:
    """Puts a cast to half, and one back, behind the gradients of weights; sharding and cut are to be found anew.

    Returns:
        The halves: what is to be reduced.
    """
    assert target.precision is not None
    dtype = _DTYPES[target.precision.half]
    return frozenset(_round(value, dtype, target.micro_batches) for value in _gradients(cut))


def _gradients(cut: Cut) -> list[SSAValue]:
    """In order of definition."""
    on_wafers = set(cut.wafer_ops)
    made = [value for op in cut.wafer_ops for value in op.results if value in cut.sharding.reduced]
    updating = _sources_of_updates(cut)
    return [
        value
        for value in made
        if value in updating
        and types.dtype(value) is torch.float32
        and cut.sharding.placements[value].reduction == "sum"
        and _is_of_backward_pass(value)
        and not any(use.operation in on_wafers for use in value.uses)
    ]


def _sources_of_updates(cut: Cut) -> set[SSAValue]:
    """All values of as many elements as a weight, of which its next value is made."""
    makers: dict[SSAValue, Operation] = {result: op for op in cut.memoryx_ops for result in op.results}
    found: set[SSAValue] = set()
    for weight in cut.weights & cut.new_states.keys():
        waiting = [cut.new_states[weight]]
        while waiting:
            value = waiting.pop()
            if value in found or elements(value) != elements(weight):
                continue
            found.add(value)
            if value in makers and value not in cut.sharding.reduced:
                waiting += makers[value].operands
    return found


def _is_of_backward_pass(value: SSAValue) -> bool:
    """Also where a text does not say where its operations come from."""
    assert isinstance(value.owner, Operation)
    source = source_of(value.owner)
    return source.backward or source == Source()


def _round(value: SSAValue, dtype: torch.dtype, micro_batches: int) -> SSAValue:
    owner = value.owner
    assert isinstance(owner, Operation) and owner.next_op is not None
    uses = list(value.uses)
    rewriter = Rewriter(owner.next_op, owner.location)
    half = _computed_half(owner, dtype) if micro_batches == 1 else None
    if half is None:
        (half,) = rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(types.shape(value), dtype)])
    (whole,) = rewriter.emit("cirh.Cast", [half], types=[types.tensor_type(types.shape(value), torch.float32)])
    for use in uses:
        use.operation.operands[use.index] = whole
    return half


def _computed_half(owner: Operation, dtype: torch.dtype) -> SSAValue | None:
    """What is computed in half already, and cast to float32 for its readers alone."""
    source = owner.operands[0] if owner.name == "cirh.Cast" else None
    if source is None or types.dtype(source) is not dtype or not isinstance(source.owner, Operation):
        return None
    return source if len(list(source.uses)) == 1 else None

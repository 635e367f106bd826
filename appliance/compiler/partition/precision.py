"""Mixed precision: casts around the wafers' operations, and gradients that travel in half precision.

Weights in MemoryX, and everything that it computes, stay float32. The cast of a weight is an operation on replicated
values, so the cut gives it to MemoryX, which then streams the half. Results that others than the wafers read, such as
sums over samples (gradients) and outputs, are cast back to float32 first.

cbfloat16 has no tensor type: its values are float32 tensors that were rounded (`cirh.RoundCb16`), and travel as such.
"""

import math

import torch
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.precision_table import EXACT, FLOAT_OPERANDS, FLOAT_RESULTS, Compute, reduction, row_of
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.core.target import ExecutionStrategy, Half, Precision, Target
from appliance.compiler.partition.cut import VIEWS, Cut, num_elements, touches_cut
from waferbox.cirh.calls import cbfloat16
from waferbox.cirh.dialect import elements, types
from waferbox.cirh.dialect.attributes import SplatAttr, attrs
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.spec import Typed
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.table.lookup import spec

FLOAT = torch.float32
_DTYPES = {Half.FLOAT16: torch.float16, Half.BFLOAT16: torch.bfloat16, Half.CBFLOAT16: FLOAT}


def insert_casts(cut: Cut, precision: Precision) -> None:
    """Inserts casts into the module of a cut. Sharding and cut must be found again; unused casts are left in it."""
    caster = _Caster(cut, precision)
    for op in cut.wafer_ops:
        if touches_cut(op, cut.sharding):
            caster.visit(op)


class _Caster:
    """Visits operations in order, and replaces those that compute in half precision.

    Readers of a replaced operation read a float32 copy of its result until they are visited themselves.
    """

    def __init__(self, cut: Cut, precision: Precision) -> None:
        self._outcomes = cut.sharding.outcomes
        self._level = precision.level
        self._dtype = _DTYPES[precision.half]
        self._halves: dict[SSAValue, SSAValue] = {}  # by float32 value: the same in half
        self._computed: set[SSAValue] = set()  # float32 values that were computed in half, not only cast for a reader
        self._statistics: set[SSAValue] = set()  # values that stay float32

    def visit(self, op: Operation) -> None:
        """Replaces an operation if the table says that it computes in half precision."""
        if op.name == "cirh.Cast":
            self._follow_cast(op)
            return
        if source_of(op).metric:
            return  # it counts in the type that its documentation says
        tensors = [*op.operands, *op.results]
        if any(types.dtype(value).is_floating_point and types.dtype(value) is not FLOAT for value in tensors):
            return  # the script chose a type, which stays
        compute = self._compute(op)
        if compute is Compute.HALF:
            self._compute_in_half(op)
        elif compute is Compute.ROUNDED:
            self._round(op)

    def _follow_cast(self, op: Operation) -> None:
        """Registers a half that the script casts to float32 as computed in half."""
        source, result = op.operands[0], op.results[0]
        if types.dtype(source) is self._dtype is not FLOAT and types.dtype(result) is FLOAT:
            self._halves[result] = source
            self._computed.add(result)

    def _compute(self, op: Operation) -> Compute:
        """The meaning of the table's row for these operands: HALF, FLOAT or ROUNDED."""
        # Partial values are parts of a sum, which rounding each part would make less exact.
        if any(want.is_partial for want in self._outcomes[op].operands) and op.name not in VIEWS:
            return Compute.FLOAT
        row = row_of(op.name, self._level)
        if op.name == "cirh.Reduce":
            row = reduction(str(attrs(op)["reduce_kind"]), self._level)
        if row is not Compute.WIDEST and row is not Compute.NARROWEST:
            return row
        floats = [operand for operand in op.operands if _is_float(operand)]
        weak = [operand for operand in floats if _is_weak(operand)]
        strong = [operand in self._computed for operand in floats if operand not in weak]
        if not any(strong) or (row is Compute.WIDEST and not all(strong)):
            return Compute.FLOAT
        if row is Compute.WIDEST and not all(self._is_exact(value) for value in weak):
            # Torch's kernels for halves do not round a number that they combine with a half, only the result.
            return Compute.ROUNDED if _is_float(op.results[0]) else Compute.FLOAT
        return Compute.HALF

    def _is_exact(self, value: SSAValue) -> bool:
        """Whether a number is exact in half. Numbers beyond the largest half stand for infinity, and count as exact."""
        number = _splat_of(value)
        return number is not None and (abs(number) > self._largest or self._rounded_number(number) == number)

    @property
    def _largest(self) -> float:
        return cbfloat16.LARGEST if self._dtype is FLOAT else torch.finfo(self._dtype).max

    def _rounded_number(self, number: float) -> float:
        """A number rounded to half. A finite one stays finite: infinite masks would make NaN of a masked row."""
        if math.isfinite(number):
            number = max(-self._largest, min(self._largest, number))
        tensor = torch.tensor([number], dtype=FLOAT)
        return (cbfloat16.round_to_cbfloat16(tensor) if self._dtype is FLOAT else tensor.to(self._dtype)).item()

    def _half(self, op: Operation, value: SSAValue) -> SSAValue:
        """A value in half, made before `op` if it does not exist. Statistics and integers are returned unchanged."""
        if not _is_float(value) or value in self._statistics:
            return value
        known = self._halves.get(value)
        if known is not None:
            return known
        number, owner = _splat_of(value), value.owner
        rewriter = Rewriter(op)
        if number is not None:
            # Not kept for other readers: a constant costs nothing.
            return rewriter.splat(self._rounded_number(number), types.shape(value), self._dtype)
        if isinstance(owner, Operation) and owner.name in VIEWS:
            # The cast goes before the view, so that a weight is cast by MemoryX and streamed as a half.
            half = self._view(rewriter, owner, self._half(op, owner.operands[0]))
        else:
            half = self._rounded_value(rewriter, value)
        self._halves[value] = half
        return half

    def _view(self, rewriter: Rewriter, op: Operation, source: SSAValue) -> SSAValue:
        given = [self._in_half(op.results[0])] if spec(op.name).typed is not Typed.NEVER else None
        return rewriter.emit(op.name, [source, *op.operands[1:]], attrs(op), types=given)[0]

    def _in_half(self, value: SSAValue) -> AnyTensorType:
        return types.tensor_type(types.shape(value), self._dtype)

    def _compute_in_half(self, op: Operation) -> None:
        """Replaces an operation by one on halves; the readers of its results read float32 copies."""
        rewriter = Rewriter(op)
        wide = FLOAT_OPERANDS.get(op.name, ())
        operands = [operand if index in wide else self._half(op, operand) for index, operand in enumerate(op.operands)]
        attributes = attrs(op)
        if attributes.get("input_dtype") == "f32":
            attributes["input_dtype"] = elements.element_name(self._dtype)
        given = None
        if spec(op.name).typed is not Typed.NEVER:
            given = [self._in_half(value) if _is_float(value) else _type_of(value) for value in op.results]
        made = rewriter.emit(op.name, operands, attributes, types=given)
        copies = list(made)
        for index, (result, value) in enumerate(zip(op.results, made, strict=True)):
            if index in FLOAT_RESULTS.get(op.name, ()):
                self._statistics.add(value)
                continue
            # In cbfloat16, rounded parts of a sum would not add up to the rounded sum.
            if _is_float(result) and not (self._dtype is FLOAT and self._outcomes[op].results[index].is_partial):
                half = self._rounded_value(rewriter, value) if op.name not in EXACT else value
                copies[index] = self._copy(rewriter, half)
        rewriter.replace(copies)

    def _round(self, op: Operation) -> None:
        """Rounds the first result of an operation that computes in float32; its readers read a float32 copy of it."""
        rewriter = Rewriter(op)
        given = [_type_of(value) for value in op.results] if spec(op.name).typed is not Typed.NEVER else None
        first, *others = rewriter.emit(op.name, list(op.operands), attrs(op), types=given)
        rewriter.replace([self._copy(rewriter, self._rounded_value(rewriter, first)), *others])

    def _rounded_value(self, rewriter: Rewriter, value: SSAValue) -> SSAValue:
        if self._dtype is FLOAT:
            return rewriter.emit("cirh.RoundCb16", [value])[0]
        if types.dtype(value) is self._dtype:
            return value
        return rewriter.emit("cirh.Cast", [value], types=[self._in_half(value)])[0]

    def _copy(self, rewriter: Rewriter, half: SSAValue) -> SSAValue:
        """The float32 copy of a half."""
        copy = half
        if self._dtype is not FLOAT:
            (copy,) = rewriter.emit("cirh.Cast", [half], types=[types.tensor_type(types.shape(half), FLOAT)])
        self._halves[copy] = half
        self._computed.add(copy)
        return copy


def _type_of(value: SSAValue) -> AnyTensorType:
    return types.tensor_type(*types.info(value))


def _is_float(value: SSAValue) -> bool:
    return types.dtype(value) is FLOAT


def _splat_of(value: SSAValue) -> float | None:
    """The number of a constant of equal elements; None for other values."""
    owner = value.owner
    return float(owner.value.value) if isinstance(owner, Const) and isinstance(owner.value, SplatAttr) else None


def _is_weak(value: SSAValue) -> bool:
    """Whether a value is a number or a tensor of rank 0, or one broadcast: torch's promotion ignores its type, too."""
    owner = value.owner
    while isinstance(owner, Operation) and owner.name in ("cirh.BroadcastInDim", "cirh.Reshape"):
        value = owner.operands[0]
        owner = value.owner
    return not types.shape(value) or (not isinstance(owner, Block) and _splat_of(value) is not None)


# --- Gradients in half precision --------------------------------------------------------------------------------------
#
# Each wafer rounds its part of a gradient once, after the last of its micro-batches. A SwarmX node that adds does so in
# float32, and rounds its sum once, so that every link carries halves: `docs/compiler.md` has the errors. MemoryX casts
# the sum back to float32. The gradients of weights are found by what the step does with them, not by name: sums over
# samples that the backward pass makes, for which no wafer waits, and from which the next value of a weight with as many
# elements is made.

_HALF_GRADIENTS = "cstorch.backends.csx.precision.half_gradients"


def check_half_gradients(target: Target) -> None:
    """Raises CompileError if gradients cannot travel in half precision, or if that saves nothing."""
    if target.precision is None or not target.precision.half_gradients:
        return
    if target.execution_strategy is ExecutionStrategy.PIPELINE:
        raise CompileError(
            "in layer pipelined mode gradients are added up and used on the one wafer, and do not travel: leave "
            f"{_HALF_GRADIENTS} False, or use the execution strategy weight_streaming"
        )
    if target.precision.half is Half.CBFLOAT16:
        raise CompileError(
            "cbfloat16 is emulated by float32 tensors with rounded values, so that gradients in it would travel as "
            f'float32: leave {_HALF_GRADIENTS} False, or use cstorch.amp.set_half_dtype("bfloat16") or "float16"'
        )


def round_gradients(cut: Cut, target: Target) -> frozenset[SSAValue]:
    """Inserts a cast to half, and one back, behind each gradient of a weight. Sharding and cut must be found again.

    Returns:
        The halves, which are to be reduced.
    """
    assert target.precision is not None
    dtype = _DTYPES[target.precision.half]
    return frozenset(_round(value, dtype, target.micro_batches) for value in _gradients(cut))


def _gradients(cut: Cut) -> list[SSAValue]:
    """The gradients of weights, in order of definition."""
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
    """Values from which the next value of a weight is made, and that have as many elements as the weight."""
    makers: dict[SSAValue, Operation] = {result: op for op in cut.memoryx_ops for result in op.results}
    found: set[SSAValue] = set()
    for weight in cut.weights & cut.new_states.keys():
        waiting = [cut.new_states[weight]]
        while waiting:
            value = waiting.pop()
            if value in found or num_elements(value) != num_elements(weight):
                continue
            found.add(value)
            if value in makers and value not in cut.sharding.reduced:
                waiting += makers[value].operands
    return found


def _is_of_backward_pass(value: SSAValue) -> bool:
    """Whether the backward pass makes a value; True as well if the text does not say where operations come from."""
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
    """The half from which an operation casts a gradient, if nothing else reads it; None if there is none."""
    source = owner.operands[0] if owner.name == "cirh.Cast" else None
    if source is None or types.dtype(source) is not dtype or not isinstance(source.owner, Operation):
        return None
    return source if len(list(source.uses)) == 1 else None

"""Mixed precision: casts around the wafers' operations, so that they compute, and are streamed, in half precision.

Weights and what MemoryX computes stay float32. A cast of a weight is work on replicated values and so MemoryX's, as the
cut finds: what it streams is the half. Results that anything but the wafers reads, sums over samples (gradients) and
outputs, are cast back to float32 first.

cbfloat16 has no tensors of its own: its values are float32 tensors that were rounded (`cirh.RoundCb16`), and travel so.
"""

import math

import torch
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.core.precision_table import EXACT, STATISTICS, Compute, reduction, row_of
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.core.target import Half, Precision
from appliance.compiler.partition.cut import VIEWS, Cut, touches_cut
from waferbox.cirh.calls import cbfloat16
from waferbox.cirh.dialect import elements, types
from waferbox.cirh.dialect.attributes import SplatAttr, attrs
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.spec import Typed
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.table.lookup import spec

FLOAT = torch.float32
_DTYPES = {Half.FLOAT16: torch.float16, Half.BFLOAT16: torch.bfloat16, Half.CBFLOAT16: FLOAT}


def insert_casts(cut: Cut, precision: Precision) -> None:
    """Changes the module of a cut; sharding and cut are to be found anew. Widening casts that nothing reads remain."""
    caster = _Caster(cut, precision)
    for op in cut.wafer_ops:
        if touches_cut(op, cut.sharding):
            caster.visit(op)


class _Caster:
    """Visits operations in order. Of a value that is computed in half, others read a float32 copy until visited."""

    def __init__(self, cut: Cut, precision: Precision) -> None:
        self._outcomes = cut.sharding.outcomes
        self._level = precision.level
        self._dtype = _DTYPES[precision.half]
        self._halves: dict[SSAValue, SSAValue] = {}  # float32 value -> the same in half
        self._computed: set[SSAValue] = set()  # of these, what was computed in half, not only cast for a reader
        self._statistics: set[SSAValue] = set()  # have no half

    def visit(self, op: Operation) -> None:
        """Computes an operation in the precision that the table says."""
        if op.name == "cirh.Cast":
            self._follow_cast(op)
            return
        tensors = [*op.operands, *op.results]
        if any(types.dtype(value).is_floating_point and types.dtype(value) is not FLOAT for value in tensors):
            return  # the user chose a type
        compute = self._compute(op)
        if compute is Compute.HALF:
            self._compute_in_half(op)
        elif compute is Compute.ROUNDED:
            self._round(op)

    def _follow_cast(self, op: Operation) -> None:
        """A half that the user casts to float32 is one that was computed in half."""
        source, result = op.operands[0], op.results[0]
        if types.dtype(source) is self._dtype is not FLOAT and types.dtype(result) is FLOAT:
            self._halves[result] = source
            self._computed.add(result)

    def _compute(self, op: Operation) -> Compute:
        """What the table's row means for these operands: HALF, FLOAT or ROUNDED."""
        if any(want.is_partial for want in self._outcomes[op].wants) and op.name not in VIEWS:
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
            # torch's kernels for halves take a number as it is, and round the result.
            return Compute.ROUNDED if _is_float(op.results[0]) else Compute.FLOAT
        return Compute.HALF

    def _is_exact(self, value: SSAValue) -> bool:
        """Whether a number is the same in half; the largest numbers stand for infinity, and count as such."""
        number = _splat_of(value)
        return number is not None and (abs(number) > self._largest or self._rounded_number(number) == number)

    @property
    def _largest(self) -> float:
        return cbfloat16.LARGEST if self._dtype is FLOAT else torch.finfo(self._dtype).max

    def _rounded_number(self, number: float) -> float:
        """A number in half. A finite one stays finite: a mask must not become infinite."""
        if math.isfinite(number):
            number = max(-self._largest, min(self._largest, number))
        tensor = torch.tensor([number], dtype=FLOAT)
        return (cbfloat16.round_to_cbfloat16(tensor) if self._dtype is FLOAT else tensor.to(self._dtype)).item()

    def _half(self, op: Operation, value: SSAValue) -> SSAValue:
        """A value in half, made before `op` if it is not there yet. Statistics and integers stay what they are."""
        if not _is_float(value) or value in self._statistics:
            return value
        known = self._halves.get(value)
        if known is not None:
            return known
        number, owner = _splat_of(value), value.owner
        rewriter = Rewriter(op)
        if number is not None:
            # Not kept: constants are shared by all, and cost nothing.
            return rewriter.splat(self._rounded_number(number), types.shape(value), self._dtype)
        if isinstance(owner, Operation) and owner.name in VIEWS:
            # So that of a weight the cast comes first: it is what is streamed.
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
        """The operation anew, of halves; what read its results reads float32 copies of them."""
        rewriter = Rewriter(op)
        operands = [self._half(op, operand) for operand in op.operands]
        attributes = attrs(op)
        if attributes.get("input_dtype") == "f32":
            attributes["input_dtype"] = elements.element_name(self._dtype)
        given = None
        if spec(op.name).typed is not Typed.NEVER:
            given = [self._in_half(value) if _is_float(value) else _type_of(value) for value in op.results]
        made = rewriter.emit(op.name, operands, attributes, types=given)
        copies = list(made)
        for index, (result, value) in enumerate(zip(op.results, made, strict=True)):
            if STATISTICS.get(op.name) == index:
                self._statistics.add(value)
                continue
            # In cbfloat16 parts of a sum that were rounded would not add up to the rounded sum.
            if _is_float(result) and not (self._dtype is FLOAT and self._outcomes[op].results[index].is_partial):
                half = self._rounded_value(rewriter, value) if op.name not in EXACT else value
                copies[index] = self._copy(rewriter, half)
        rewriter.replace(copies)

    def _round(self, op: Operation) -> None:
        """The operation anew, as it is; what read its first result reads a float32 copy of that in half."""
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
    """The number of a constant of one value."""
    owner = value.owner
    return float(owner.value.value) if isinstance(owner, Const) and isinstance(owner.value, SplatAttr) else None


def _is_weak(value: SSAValue) -> bool:
    """A number or a tensor of rank 0, or one broadcast: as in torch's promotion, it does not decide a type."""
    owner = value.owner
    while isinstance(owner, Operation) and owner.name in ("cirh.BroadcastInDim", "cirh.Reshape"):
        value = owner.operands[0]
        owner = value.owner
    return not types.shape(value) or (not isinstance(owner, Block) and _splat_of(value) is not None)

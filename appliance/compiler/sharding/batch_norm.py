"""The parts of batch norm in training, whose statistics are those of the whole batch.

Forward: the mean is reduced over the wafers, then the variance around it. (One reduction, of a sum of squares, would
lose the digits of a variance that is small beside the mean.) Backward: the gradients of weight and bias are reduced,
and that of the input is made of them. What lies between is work for torch's kernels for evaluation.
"""

import math
from dataclasses import dataclass

import torch
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.reductions import NONE
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.sharding.rules.norm import CHANNELS
from appliance.compiler.sharding.sums import divided, spread, sum_over
from cirh.dialect import types
from cirh.dialect.attributes import AttrValue, attrs
from cirh.table.lookup import site_of, spec


@dataclass(frozen=True, slots=True)
class _Norm:
    """One batch norm: its operands by name, and how its input is reduced."""

    rewriter: Rewriter
    operands: dict[str, SSAValue]
    shape: tuple[int, ...]
    exact: torch.dtype  # of sums: no narrower than float32

    @property
    def reduced(self) -> list[int]:
        return [dim for dim in range(len(self.shape)) if dim != CHANNELS]

    @property
    def count(self) -> int:
        """The elements of a channel, in the whole batch."""
        return math.prod(self.shape[dim] for dim in self.reduced)

    def emit(self, name: str, *operands: SSAValue) -> SSAValue:
        return self.rewriter.emit(name, operands)[0]

    def kernel(self, name: str, operands: dict[str, SSAValue], attributes: dict[str, AttrValue]) -> list[SSAValue]:
        """An ATen operation some of whose operands may be absent."""
        names = [operand.name for operand in spec(name).operands]
        segments = [int(operand in operands) for operand in names]
        given = [operands[operand] for operand in names if operand in operands]
        return list(self.rewriter.emit(name, given, {**attributes, "operand_segments": segments}))

    def cast(self, value: SSAValue, dtype: torch.dtype) -> SSAValue:
        if types.dtype(value) == dtype:
            return value
        return self.rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(types.shape(value), dtype)])[0]

    def number(self, value: float, like: SSAValue) -> SSAValue:
        return self.rewriter.splat(value, types.shape(like), types.dtype(like))

    def spread(self, value: SSAValue) -> SSAValue:
        """A value for each channel as one for each element."""
        return spread(self.rewriter, value, self.shape, [CHANNELS])

    def mean(self, value: SSAValue) -> SSAValue:
        return divided(self.rewriter, sum_over(self.rewriter, value, self.reduced), self.count)


def _norm(op: Operation, rewriter: Rewriter) -> _Norm:
    listed = iter(op.operands)
    counts = zip(spec(op.name).operands, site_of(op).segments, strict=True)
    operands = {operand.name: next(listed) for operand, count in counts if count}
    shape, dtype = types.info(operands["input"])
    return _Norm(rewriter, operands, shape, torch.promote_types(dtype, torch.float32))


def batch_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Results: the normalised input, mean, 1 / deviation and, if there are running statistics, their next values."""
    norm = _norm(op, rewriter)
    attributes = attrs(op)
    epsilon, momentum = float(attributes["eps"]), float(attributes["momentum"])  # type: ignore[arg-type]
    given = norm.cast(norm.operands["input"], norm.exact)
    mean = norm.mean(given)
    # The square of the distance from the mean, in one pass.
    (square,) = rewriter.emit("aten.mse_loss", [given, norm.spread(mean)], {"reduction": NONE})
    variance = norm.mean(square)
    statistics = types.dtype(op.results[1])
    with_statistics = {
        **norm.operands,
        "running_mean": norm.cast(mean, statistics),
        "running_var": norm.cast(variance, statistics),
    }
    normalised = norm.kernel(
        "aten._native_batch_norm_legit_no_training", with_statistics, {"momentum": momentum, "eps": epsilon}
    )[0]
    rstd = norm.emit("cirh.Rsqrt", norm.emit("cirh.Add", variance, norm.number(epsilon, variance)))
    results = [normalised, norm.cast(mean, statistics), norm.cast(rstd, statistics)]
    if "running_mean" in norm.operands:
        unbiased = norm.emit("cirh.Mul", variance, norm.number(norm.count / (norm.count - 1), variance))
        results += [
            _moved(norm, norm.operands["running_mean"], mean, momentum),
            _moved(norm, norm.operands["running_var"], unbiased, momentum),
        ]
    return results


def _moved(norm: _Norm, running: SSAValue, new: SSAValue, momentum: float) -> SSAValue:
    """A running statistic, moved towards a new one."""
    new = norm.cast(new, types.dtype(running))
    old_part = norm.emit("cirh.Mul", running, norm.number(1 - momentum, running))
    return norm.emit("cirh.Add", old_part, norm.emit("cirh.Mul", new, norm.number(momentum, new)))


def batch_norm_backward(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Results: the gradients of input, weight and bias, as far as they are asked for.

    With h the normalised input and g the gradient: dw = sum(g * h), db = sum(g), and
    dx = (g - db / n - h * dw / n) * weight / deviation.
    """
    norm = _norm(op, rewriter)
    mask = attrs(op)["output_mask"]
    assert isinstance(mask, list)
    mean, rstd = norm.operands["save_mean"], norm.operands["save_invstd"]
    # The kernel for evaluation makes both sums in one pass; 1 / (1 / deviation)^2 is the variance with epsilon in it.
    statistics = {
        "running_mean": mean,
        "running_var": norm.emit("cirh.Reciprocal", norm.emit("cirh.Mul", rstd, rstd)),
    }
    operands = {name: value for name, value in norm.operands.items() if not name.startswith("save_")}
    _, weight_gradient, bias_gradient = norm.kernel(
        op.name, {**operands, **statistics}, {"train": False, "eps": 0.0, "output_mask": [False, True, True]}
    )
    absent = rewriter.splat(0, (0,), torch.float32)
    input_gradient = _input_gradient(norm, mean, rstd, weight_gradient, bias_gradient) if mask[0] else absent
    return [input_gradient, weight_gradient if mask[1] else absent, bias_gradient if mask[2] else absent]


def _input_gradient(norm: _Norm, mean: SSAValue, rstd: SSAValue, dw: SSAValue, db: SSAValue) -> SSAValue:
    mean, rstd, dw, db = (norm.cast(value, norm.exact) for value in (mean, rstd, dw, db))
    factor = rstd
    if "weight" in norm.operands:
        factor = norm.emit("cirh.Mul", rstd, norm.cast(norm.operands["weight"], norm.exact))
    of_sample = norm.emit("cirh.Neg", norm.emit("cirh.Mul", factor, divided(norm.rewriter, db, norm.count)))
    share = norm.emit("cirh.Mul", rstd, divided(norm.rewriter, dw, norm.count))
    of_distance = norm.emit("cirh.Neg", norm.emit("cirh.Mul", factor, share))
    distance = norm.emit("cirh.Sub", norm.cast(norm.operands["input"], norm.exact), norm.spread(mean))
    through_statistics = norm.emit("aten.addcmul", norm.spread(of_sample), distance, norm.spread(of_distance))
    gradient = norm.cast(norm.operands["grad_out"], norm.exact)
    whole = norm.emit("aten.addcmul", through_statistics, gradient, norm.spread(factor))
    return norm.cast(whole, types.dtype(norm.operands["input"]))

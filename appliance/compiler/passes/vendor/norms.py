"""Norms of the real dialect as torch's: those keep their statistics for the backward pass, and have sharding rules.

The real dialect's gradients have what was normalised among their operands, and no statistics. Where the norm itself is
in the step, its statistics are taken; so those of a batch norm are made once, over all wafers. Halves are normalised by
statistics in float32.
"""

from collections.abc import Callable

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from cirh.calls.norms import epsilon_of, group_sizes
from cirh.dialect import types
from cirh.dialect.attributes import AttrValue, attrs
from cirh.dialect.operations import body_ops
from cirh.table.lookup import SEGMENTS, site_of

_DEFAULT_EPSILON = 1e-5
_LAYER_NORM = "aten.native_layer_norm"
_BATCH_NORM = "aten._native_batch_norm_legit.no_stats"
_ALL = [True, True, True]
Values = list[SSAValue]


def replace_norms(module: ModuleOp) -> bool:
    """Rewrites every norm and every gradient of one. Whether there were any."""
    changed = False
    for op in body_ops(module):
        rewrite = _NORMS.get(op.name)
        if rewrite is not None:
            rewriter = Rewriter(op)
            made = rewrite(op, rewriter)
            rewriter.replace(
                [_cast(rewriter, new, types.dtype(old)) for new, old in zip(made, op.results, strict=True)]
            )
            changed = True
    return changed


def _cast(rewriter: Rewriter, value: SSAValue, dtype: torch.dtype) -> SSAValue:
    shape, given = types.info(value)
    if given is dtype:
        return value
    return rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(shape, dtype)])[0]


def _exact(rewriter: Rewriter, *values: SSAValue) -> Values:
    """Values in no less than float32."""
    return [_cast(rewriter, value, torch.promote_types(types.dtype(value), torch.float32)) for value in values]


def _statistics(rewriter: Rewriter, name: str, operands: Values, attributes: dict[str, AttrValue]) -> Values:
    """Mean and 1 / deviation of the first operand: of the same norm, if it was there before, or of a new one."""
    for use in operands[0].uses:
        norm = use.operation
        same = norm.name == name and use.index == 0 and attrs(norm).keys() >= attributes.keys()
        if same and all(attrs(norm)[key] == value for key, value in attributes.items() if key != SEGMENTS):
            return list(norm.results[1:3])
    return list(rewriter.emit(name, operands, attributes)[1:3])


def _layer_settings(op: Operation, gamma: SSAValue) -> dict[str, AttrValue]:
    epsilon = attrs(op).get("epsilon", _DEFAULT_EPSILON)
    return {"normalized_shape": list(types.shape(gamma)), "eps": epsilon, SEGMENTS: [1, 1, 1]}


def _layer_norm(op: Operation, rewriter: Rewriter) -> Values:
    data, beta, gamma = op.operands
    weights = _exact(rewriter, gamma, beta)
    return list(rewriter.emit(_LAYER_NORM, [data, *weights], _layer_settings(op, gamma))[:1])


def _layer_norm_grad(op: Operation, rewriter: Rewriter) -> Values:
    gradient, data, beta, gamma = op.operands
    weights = _exact(rewriter, gamma, beta)
    settings = _layer_settings(op, gamma)
    mean, rstd = _statistics(rewriter, _LAYER_NORM, [data, *weights], settings)
    made = rewriter.emit(
        "aten.native_layer_norm_backward",
        [gradient, data, mean, rstd, *weights],
        {"normalized_shape": settings["normalized_shape"], "output_mask": _ALL, SEGMENTS: [1] * 6},
    )
    return [made[0], made[2], made[1]]


def _batch_settings(op: Operation) -> dict[str, AttrValue]:
    return {"training": True, "momentum": 0.0, "eps": epsilon_of(site_of(op))}


def _batch_norm(op: Operation, rewriter: Rewriter) -> Values:
    data, *others = op.operands
    scale, offset, mean, variance = _exact(rewriter, *others)
    settings = _batch_settings(op)
    if attrs(op)["is_training"]:
        made = rewriter.emit(_BATCH_NORM, [data, scale, offset], {**settings, SEGMENTS: [1, 1, 1]})
    else:
        del settings["training"]
        made = rewriter.emit(
            "aten._native_batch_norm_legit_no_training",
            [data, scale, offset, mean, variance],
            {**settings, SEGMENTS: [1] * 5},
        )
    return [made[0], mean, variance]  # verification saw that nothing reads these two


def _batch_norm_grad(op: Operation, rewriter: Rewriter) -> Values:
    gradient, data, given = op.operands
    (scale,) = _exact(rewriter, given)
    settings = _batch_settings(op)
    mean, rstd = _statistics(rewriter, _BATCH_NORM, [data, scale], {**settings, SEGMENTS: [1, 1, 0]})
    return list(
        rewriter.emit(
            "aten.native_batch_norm_backward",
            [gradient, data, scale, mean, rstd],
            {"train": True, "eps": settings["eps"], "output_mask": _ALL, SEGMENTS: [1, 1, 1, 0, 0, 1, 1]},
        )
    )


def _group_settings(op: Operation, image: int) -> dict[str, AttrValue]:
    samples, channels, places, groups = group_sizes(site_of(op), image)
    return {"N": samples, "C": channels, "HxW": places, "group": groups}


def _group_norm(op: Operation, rewriter: Rewriter) -> Values:
    operands = _exact(rewriter, *op.operands)
    settings = {**_group_settings(op, 0), "eps": epsilon_of(site_of(op))}
    weights = int(len(operands) == 3)
    return list(rewriter.emit("aten.native_group_norm", operands, {**settings, SEGMENTS: [1, weights, weights]})[:1])


def _group_norm_grad(op: Operation, rewriter: Rewriter) -> Values:
    gradient, data, scale = _exact(rewriter, *op.operands)
    settings = _group_settings(op, 1)
    named: dict[str, AttrValue] = {**settings, "eps": epsilon_of(site_of(op)), SEGMENTS: [1, 1, 0]}
    mean, rstd = _statistics(rewriter, "aten.native_group_norm", [data, scale], named)
    return list(
        rewriter.emit(
            "aten.native_group_norm_backward",
            [gradient, data, mean, rstd, scale],
            {**settings, "output_mask": _ALL, SEGMENTS: [1] * 5},
        )
    )


_NORMS: dict[str, Callable[[Operation, Rewriter], Values]] = {
    "cirh.LayerNorm": _layer_norm,
    "cirh.LayerNormGrad": _layer_norm_grad,
    "cirh.FusedBatchNorm": _batch_norm,
    "cirh.FusedBatchNormGrad": _batch_norm_grad,
    "cirh.GroupNorm": _group_norm,
    "cirh.GroupNormGrad": _group_norm_grad,
}

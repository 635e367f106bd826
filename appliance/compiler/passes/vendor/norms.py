"""Replaces norms of the real dialect by torch's, which keep their statistics for the backward pass and have rules.

The real dialect's gradients read the normalised tensor, and no statistics. If the norm itself is in the step, its
statistics are used, so those of a batch norm are computed once, over all wafers. Halves are normalised by statistics in
float32.

In training, the vendor's client gives a batch norm its running statistics and their momentum, but its step returns them
unchanged. They are updated here as in torch; otherwise an evaluation would use the initial ones.
"""

import math
from collections.abc import Callable

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from appliance.compiler.core.errors import refuse
from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.calls.network import DEFAULT_EPSILON
from waferbox.cirh.calls.norms import epsilon_of, group_sizes
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import Return, body_ops, return_of
from waferbox.cirh.table.lookup import SEGMENTS, site_of

_LAYER_NORM = "aten.native_layer_norm"
_BATCH_NORM = "aten._native_batch_norm_legit.no_stats"
_RUNNING = "aten._native_batch_norm_legit_functional"
_EVALUATED = "aten._native_batch_norm_legit_no_training"
_GROUP_NORM = "aten.native_group_norm"
_ALL = [True, True, True]
Values = list[SSAValue]


def replace_norms(module: ModuleOp) -> bool:
    """Replaces each norm and each gradient of one. Returns whether there were any."""
    norms = _Norms(return_of(module))
    changed = False
    for op in body_ops(module):
        if op.name in _NORMS:
            rewriter = Rewriter(op)
            made = zip(_NORMS[op.name](norms, op, rewriter), op.results, strict=True)
            rewriter.replace([_cast(rewriter, new, types.dtype(old)) for new, old in made])
            changed = True
    return changed


def _cast(rewriter: Rewriter, value: SSAValue, dtype: torch.dtype) -> SSAValue:
    shape, given = types.info(value)
    if given is dtype:
        return value
    return rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(shape, dtype)])[0]


def _exact(rewriter: Rewriter, *values: SSAValue) -> Values:
    """The values in float32, or in a wider type if they have one."""
    return [_cast(rewriter, value, torch.promote_types(types.dtype(value), torch.float32)) for value in values]


class _Norms:
    """The norms that were rewritten so far, with their statistics: mean and 1 / deviation."""

    def __init__(self, last: Return) -> None:
        self._last = last
        self._kept = {value: place for place, value in enumerate(last.operands) if isinstance(value, BlockArgument)}
        self._statistics: dict[tuple[SSAValue, str, str], Values] = {}
        # Of batch norms in evaluation, by the normalised tensor: mean and variance as given, and in float32.
        self._given: dict[tuple[SSAValue, str], list[tuple[Values, Values]]] = {}
        self._epsilons: dict[tuple[SSAValue, str], set[float]] = {}  # of group norms, by the normalised tensor

    def layer_norm(self, op: Operation, rewriter: Rewriter) -> Values:
        data, beta, gamma = op.operands
        operands = [data, *_exact(rewriter, gamma, beta)]
        return self._emit(rewriter, data, _LAYER_NORM, operands, _layer_settings(op, gamma))[:1]

    def layer_norm_grad(self, op: Operation, rewriter: Rewriter) -> Values:
        gradient, data, beta, gamma = op.operands
        weights = _exact(rewriter, gamma, beta)
        settings = _layer_settings(op, gamma)
        statistics = self._of(rewriter, data, _LAYER_NORM, [data, *weights], settings)
        shape = {"normalized_shape": settings["normalized_shape"], "output_mask": _ALL, SEGMENTS: [1] * 6}
        dx, dgamma, dbeta = rewriter.emit(f"{_LAYER_NORM}_backward", [gradient, data, *statistics, *weights], shape)
        return [dx, dbeta, dgamma]

    def batch_norm(self, op: Operation, rewriter: Rewriter) -> Values:
        data, *others = op.operands
        scale, offset, mean, variance = _exact(rewriter, *others)
        settings = _batch_settings(op)
        places = [place for statistic in others[2:] if (place := self._running(statistic)) is not None]
        if not attrs(op)["is_training"]:
            operands = [data, scale, offset, mean, variance]
            self._given.setdefault((data, repr(settings)), []).append((others[2:], [mean, variance]))
            y = rewriter.emit(_EVALUATED, operands, {**settings, SEGMENTS: [1] * 5})[0]
        elif len(places) == 2:
            y = self._move(op, rewriter, [data, scale, offset], {**settings, "training": True}, places)
        else:
            y = self._emit(rewriter, data, _BATCH_NORM, [data, scale, offset], {**settings, "training": True})[0]
        return [y, mean, variance]  # verification has checked that nothing reads the last two

    def _running(self, statistic: SSAValue) -> int | None:
        """The index of the step's result that returns a running statistic, which may have been cast for the norm."""
        while isinstance(statistic.owner, Operation) and statistic.owner.name == "cirh.Cast":
            (statistic,) = statistic.owner.operands
        return self._kept.get(statistic) if isinstance(statistic, BlockArgument) else None

    def _move(
        self, op: Operation, rewriter: Rewriter, operands: Values, settings: dict[str, AttrValue], places: list[int]
    ) -> SSAValue:
        """Makes a batch norm in training, which updates its running statistics. Returns the normalised tensor."""
        running = [self._last.operands[place] for place in places]
        asked = {**settings, "momentum": attrs(op).get("exponential_avg_factor", 1.0), SEGMENTS: [1] * 5}
        y, *statistics, mean, variance = rewriter.emit(_RUNNING, [*operands, *running], asked)
        self._statistics[operands[0], _BATCH_NORM, repr(settings)] = statistics
        for place, moved in zip(places, (mean, variance), strict=True):
            self._last.operands[place] = moved
        return y

    def batch_norm_grad(self, op: Operation, rewriter: Rewriter) -> Values:
        gradient, data, given = op.operands
        (scale,) = _exact(rewriter, given)
        is_training = bool(attrs(op)["is_training"])
        settings = {**_batch_settings(op), "training": True}
        asked: dict[str, AttrValue] = {"train": is_training, "eps": settings["eps"], "output_mask": _ALL}
        if is_training:
            statistics = self._of(rewriter, data, _BATCH_NORM, [data, scale], settings)
            asked[SEGMENTS] = [1, 1, 1, 0, 0, 1, 1]
        else:
            statistics = self._statistics_given(op)
            asked[SEGMENTS] = [1, 1, 1, 1, 1, 0, 0]
        return list(rewriter.emit("aten.native_batch_norm_backward", [gradient, data, scale, *statistics], asked))

    def _statistics_given(self, op: Operation) -> Values:
        """The statistics of the norm of the same tensor in evaluation, which the gradient does not have as operands."""
        known = self._given.get((op.operands[1], repr(_batch_settings(op))), [])
        if len({tuple(values) for values, _ in known}) != 1:
            raise refuse(
                op,
                f"is by given statistics, and norms of the same data have {len(known)} different ones",
                "normalise each tensor by one BatchNorm, or train it",
            )
        return known[0][1]

    def group_norm(self, op: Operation, rewriter: Rewriter) -> Values:
        data, *weights = _exact(rewriter, *op.operands)
        sizes, epsilon = _group_sizes(op, 0), epsilon_of(site_of(op))
        self._epsilons.setdefault((op.operands[0], repr(sizes)), set()).add(epsilon)
        operands = [data, *(_flat(rewriter, weight) for weight in weights)]
        return self._emit(rewriter, op.operands[0], _GROUP_NORM, operands, {**sizes, "eps": epsilon})[:1]

    def group_norm_grad(self, op: Operation, rewriter: Rewriter) -> Values:
        gradient, data, *given = _exact(rewriter, *op.operands)
        sizes = _group_sizes(op, 1)
        ones = rewriter.splat(1, types.shape(data)[1:2], types.dtype(data))
        scale = _flat(rewriter, given[0]) if given else ones
        settings = {**sizes, "eps": self._group_epsilon(op, sizes)}
        statistics = self._of(rewriter, op.operands[1], _GROUP_NORM, [data, scale], settings)
        operands = [gradient, data, *statistics, scale]
        made = rewriter.emit(f"{_GROUP_NORM}_backward", operands, {**sizes, "output_mask": _ALL})
        return [made[0], *(_shaped(rewriter, each, types.shape(given[0])) for each in made[1:] if given)]

    def _group_epsilon(self, op: Operation, sizes: dict[str, AttrValue]) -> float:
        """The gradient's epsilon, or that of the norm of the same tensor: the client writes none for the gradient."""
        if "epsilon" in attrs(op):
            return epsilon_of(site_of(op))
        known = self._epsilons.get((op.operands[1], repr(sizes)), set())
        if len(known) != 1:
            raise refuse(
                op,
                f"has no epsilon, and {len(known)} different ones are those of norms of the same data",
                "normalise each tensor by one GroupNorm",
            )
        return next(iter(known))

    def _emit(
        self, rewriter: Rewriter, data: SSAValue, name: str, operands: Values, settings: dict[str, AttrValue]
    ) -> Values:
        """Makes a norm of `data`. Returns its results. operands: data, maybe in another type, and existing weights."""
        weights = [int(index < len(operands)) for index in (1, 2)]
        made = list(rewriter.emit(name, operands, {**settings, SEGMENTS: [1, *weights]}))
        self._statistics[data, name, repr(settings)] = made[1:3]
        return made

    def _of(
        self, rewriter: Rewriter, data: SSAValue, name: str, operands: Values, settings: dict[str, AttrValue]
    ) -> Values:
        """The statistics of a norm that exists, or of one that is made for them."""
        known = self._statistics.get((data, name, repr(settings)))
        return known if known is not None else self._emit(rewriter, data, name, operands, settings)[1:3]


def _layer_settings(op: Operation, gamma: SSAValue) -> dict[str, AttrValue]:
    return {"normalized_shape": list(types.shape(gamma)), "eps": attrs(op).get("epsilon", DEFAULT_EPSILON)}


def _batch_settings(op: Operation) -> dict[str, AttrValue]:
    return {"momentum": 0.0, "eps": epsilon_of(site_of(op))}


def _group_sizes(op: Operation, image: int) -> dict[str, AttrValue]:
    samples, channels, places, groups = group_sizes(site_of(op), image)
    return {"N": samples, "C": channels, "HxW": places, "group": groups}


def _shaped(rewriter: Rewriter, value: SSAValue, shape: tuple[int, ...]) -> SSAValue:
    if types.shape(value) == shape:
        return value
    return rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(shape, types.dtype(value))])[0]


def _flat(rewriter: Rewriter, weight: SSAValue) -> SSAValue:
    """A weight with one dimension; the client may write it with a row for each group."""
    return _shaped(rewriter, weight, (math.prod(types.shape(weight)),))


_NORMS: dict[str, Callable[[_Norms, Operation, Rewriter], Values]] = {
    "cirh.LayerNorm": _Norms.layer_norm,
    "cirh.LayerNormGrad": _Norms.layer_norm_grad,
    "cirh.FusedBatchNorm": _Norms.batch_norm,
    "cirh.FusedBatchNormGrad": _Norms.batch_norm_grad,
    "cirh.GroupNorm": _Norms.group_norm,
    "cirh.GroupNormGrad": _Norms.group_norm_grad,
}

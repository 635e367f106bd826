"""Rules for operations that make tensors: of one value, of a range, and of random numbers."""

from typing import Any, Final

import torch
from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Rule, arguments_of, dtype_of, shape_of
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.elements import element_name


def filled(value: float) -> Rule:
    """zeros, ones and similar. Empty tensors are zero, so that all runs are equal."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        return lowering.splat(value, shape_of(node), dtype_of(node))

    return rule


def filled_with(argument: str) -> Rule:
    """full and similar: the value is an argument, a number or a tensor of rank 0."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        return lowering.operand(arguments_of(node)[argument], shape_of(node), dtype_of(node))

    return rule


def arange(lowering: Lowering, node: fx.Node) -> SSAValue:
    arguments = arguments_of(node)
    attributes = {
        "start": arguments.get("start", 0),
        "end": arguments["end"],
        "step": arguments.get("step", 1),
        "dtype": element_name(dtype_of(node)),
    }
    return lowering.emit("aten.arange.start_step", [], attributes)


# --- Random numbers ---------------------------------------------------------------------------------------------------
#
# Each operation has its own key: the step's counter plus a multiple of the operation's index among the random ones. The
# keys of two operations never meet, in any steps. So the numbers are the same on any number of wafers.

_STEPS: Final = 1 << 40  # the number of steps that a counter may count


def _draw(
    lowering: Lowering,
    node: fx.Node,
    name: str,
    operands: list[SSAValue],
    attributes: dict[str, AttrValue],
    result: tuple[tuple[int, ...], torch.dtype],
) -> SSAValue:
    assert lowering.counter is not None, "the step draws random numbers without a counter"
    position = lowering.splat(node.meta["draw"] * _STEPS, (), torch.int64)
    key = lowering.emit("cirh.Add", [lowering.counter, position])
    return lowering.emit(name, [*operands, key], attributes, result)


def _uniform(
    lowering: Lowering, node: fx.Node, low: float, high: float, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> SSAValue:
    shape = shape_of(node) if shape is None else shape
    sizes = lowering.builder.dense(torch.tensor(shape, dtype=torch.int64, device="cpu"), lowering.source)
    bounds = [lowering.splat(bound, (), dtype) for bound in (low, high)]
    return _draw(lowering, node, "cirh.RandomUniform", [*bounds, sizes], {}, (shape, dtype))


def _normal(lowering: Lowering, node: fx.Node, mean: float, std: float) -> SSAValue:
    moments = [lowering.splat(moment, (), dtype_of(node)) for moment in (mean, std)]
    return _draw(lowering, node, "cirh.RandomNormal", moments, {}, (shape_of(node), dtype_of(node)))


def _mask(lowering: Lowering, node: fx.Node, probability: float, shape: tuple[int, ...]) -> SSAValue:
    attributes: dict[str, AttrValue] = {"probability": float(probability)}
    return _draw(lowering, node, "cirh.RandomBernoulli", [], attributes, (shape, torch.bool))


def uniform(lowering: Lowering, node: fx.Node) -> SSAValue:
    """rand and similar, and uniform_(from, to)."""
    arguments = arguments_of(node)
    return _uniform(lowering, node, arguments.get("from", 0.0), arguments.get("to", 1.0), dtype_of(node))


def normal(lowering: Lowering, node: fx.Node) -> SSAValue:
    """randn and similar, normal_, and torch.normal of numbers and tensors."""
    arguments = arguments_of(node)
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    shape, dtype = shape_of(node), dtype_of(node)
    if not isinstance(mean, fx.Node) and not isinstance(std, fx.Node):
        return _normal(lowering, node, mean, std)
    spread = lowering.emit("cirh.Mul", [_normal(lowering, node, 0.0, 1.0), lowering.operand(std, shape, dtype)])
    return lowering.emit("cirh.Add", [spread, lowering.operand(mean, shape, dtype)])


def integers(lowering: Lowering, node: fx.Node) -> SSAValue:
    """randint and similar, and random_ with bounds."""
    arguments = arguments_of(node)
    low: Any = arguments.get("low", arguments.get("from", 0))
    high: Any = arguments.get("high", arguments.get("to"))
    if not isinstance(low, int) or not isinstance(high, int):
        raise lowering.unsupported("random integers without bounds that are numbers", "Give them: random_(0, 100).")
    attributes: dict[str, AttrValue] = {"low": low, "high": high}
    return _draw(lowering, node, "cirh.RandomInteger", [], attributes, (shape_of(node), dtype_of(node)))


def permutation(lowering: Lowering, node: fx.Node) -> SSAValue:
    """randperm: the sorted order of as many random numbers."""
    numbers = _uniform(lowering, node, 0.0, 1.0, torch.float64)
    _, order = lowering.builder.op("aten.sort", [numbers], {"dim": 0, "descending": False}, lowering.source)
    return lowering.cast(order, dtype_of(node))


def bernoulli(lowering: Lowering, node: fx.Node) -> SSAValue:
    """bernoulli of one probability, or of a tensor of them."""
    shape, dtype = shape_of(node), dtype_of(node)
    arguments = arguments_of(node)
    probability = arguments["p"] if "p" in arguments else arguments["self"]
    if not isinstance(probability, fx.Node):
        return lowering.cast(_mask(lowering, node, probability, shape), dtype)
    kind = dtype_of(probability) if dtype_of(probability).is_floating_point else torch.float32
    numbers = _uniform(lowering, node, 0.0, 1.0, kind)
    operands = [numbers, lowering.operand(probability, shape, kind)]
    return lowering.cast(lowering.emit("cirh.Compare", operands, {"comparison_direction": "LT"}), dtype)


def exponential(lowering: Lowering, node: fx.Node) -> SSAValue:
    """-log(1 - u) / lambda for u in [0, 1): never infinite."""
    shape, dtype = shape_of(node), dtype_of(node)
    rest = lowering.emit("cirh.Sub", [lowering.splat(1, shape, dtype), _uniform(lowering, node, 0.0, 1.0, dtype)])
    rate = lowering.splat(-arguments_of(node)["lambd"], shape, dtype)
    return lowering.emit("cirh.Div", [lowering.emit("cirh.Log", [rest]), rate])


def dropout(lowering: Lowering, node: fx.Node) -> tuple[SSAValue, SSAValue]:
    """native_dropout: the result, and the mask of the elements that stay."""
    arguments = arguments_of(node)
    value, p = lowering.value(arguments["input"]), arguments["p"]
    if arguments["train"] is False:
        return value, lowering.splat(True, types.shape(value), torch.bool)
    mask = _mask(lowering, node, 1 - p, types.shape(value))
    # The same operation as for the gradient, so that both have the same factor.
    scale = {"scale": 1 / (1 - p) if p < 1 else 0.0}
    return lowering.emit("aten.native_dropout_backward", [value, mask], scale), mask


def rrelu(lowering: Lowering, node: fx.Node) -> tuple[SSAValue, SSAValue]:
    """rrelu_with_noise: the result, and the slope of each element, which is random where it is negative."""
    arguments = arguments_of(node)
    value, low, high = lowering.value(arguments["self"]), arguments.get("lower", 1 / 8), arguments.get("upper", 1 / 3)
    shape, dtype = types.shape(value), types.dtype(value)
    if is_random := arguments.get("training", False):
        slopes = _uniform(lowering, node, low, high, dtype, shape)
    else:
        slopes = lowering.splat((low + high) / 2, shape, dtype)
    negative = lowering.emit("cirh.Compare", [value, lowering.splat(0, shape, dtype)], {"comparison_direction": "LE"})
    noise = lowering.emit("cirh.Select", [negative, slopes, lowering.splat(1, shape, dtype)])
    return lowering.emit("cirh.Mul", [value, noise]), noise if is_random else lowering.value(arguments["noise"])

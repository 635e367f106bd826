"""Rules for tensors of one value, which stay one element whatever their shape, and for counting ranges."""

from torch import fx
from xdsl.ir import SSAValue

from cirh.dialect.elements import element_name
from cstorch.lowering.context import Lowering, Rule, arguments_of, dtype_of, shape_of


def filled(value: float) -> Rule:
    """zeros, ones and their kin. What is created empty is zero: the same in every run."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        return lowering.splat(value, shape_of(node), dtype_of(node))

    return rule


def filled_with(argument: str) -> Rule:
    """full and its kin: the value is an argument, a number or a tensor of rank 0."""

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

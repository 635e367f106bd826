"""Reading a module as a graph: its signature, parts of it as modules of their own, and a text for comparison."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FunctionType, IntegerAttr, ModuleOp, StringAttr, i64
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect.operations import Const, body_ops, func_of, operation_class, return_of
from waferbox.cirh.dialect.types import AnyTensorType, tensor_type
from waferbox.cirh.modules.builder import ALIAS, INPUT_NAME, OUTPUT_NAME, STATE_NAME, WAFERS, GraphBuilder
from waferbox.cirh.text.printer import print_module


@dataclass(frozen=True, slots=True)
class StateArg:
    """A state: argument `argument`, which result `result` replaces after the step (None: it is not replaced)."""

    name: str
    argument: int
    result: int | None


@dataclass(frozen=True, slots=True)
class InputArg:
    """A tensor of the batch."""

    name: str
    argument: int


@dataclass(frozen=True, slots=True)
class OutputResult:
    """A tensor that the step returns to the user's script."""

    name: str
    result: int


@dataclass(frozen=True, slots=True)
class Signature:
    """The meaning of a module's arguments and results, in their order.

    `wafers` is the argument that holds the numbers of all wafers, from 0; None if no operation reads them.
    """

    states: tuple[StateArg, ...]
    inputs: tuple[InputArg, ...]
    outputs: tuple[OutputResult, ...]
    wafers: int | None = None


def signature(module: ModuleOp) -> Signature:
    """The signature of a verified module."""
    function = func_of(module)
    states, inputs, outputs, wafers = [], [], [], None
    for index, attributes in enumerate(function.argument_attributes):
        state, name, alias = (attributes.data.get(key) for key in (STATE_NAME, INPUT_NAME, ALIAS))
        if isinstance(state, StringAttr):
            states.append(StateArg(state.data, index, alias.value.data if isinstance(alias, IntegerAttr) else None))
        elif isinstance(name, StringAttr):
            inputs.append(InputArg(name.data, index))
        elif WAFERS in attributes.data:
            wafers = index
    for index, attributes in enumerate(function.result_attributes):
        output = attributes.data.get(OUTPUT_NAME)
        if isinstance(output, StringAttr):
            outputs.append(OutputResult(output.data, index))
    return Signature(tuple(states), tuple(inputs), tuple(outputs), wafers)


def add_state(module: ModuleOp, name: str, type: AnyTensorType) -> SSAValue:
    """Adds a state: a new last argument, and a new last result, which for now is the argument itself."""
    function, last = func_of(module), return_of(module)
    argument = function.block.insert_arg(type, len(function.block.args))
    last.operands = [*last.operands, argument]
    names = {STATE_NAME: StringAttr(name), ALIAS: IntegerAttr(len(last.operands) - 1, i64)}
    function.attributes["arg_attrs"] = ArrayAttr([*function.argument_attributes, DictionaryAttr(names)])
    function.attributes["res_attrs"] = ArrayAttr([*function.result_attributes, DictionaryAttr({})])
    types = [value.type for value in function.block.args], [value.type for value in last.operands]
    function.attributes["function_type"] = FunctionType.from_lists(*types)
    return argument


def add_wafers(module: ModuleOp, count: int) -> SSAValue:
    """Adds the numbers of `count` wafers, int64 [count], as a new last argument."""
    function = func_of(module)
    argument = function.block.insert_arg(tensor_type((count,), torch.int64), len(function.block.args))
    named = [*function.argument_attributes, DictionaryAttr({WAFERS: IntegerAttr(count, i64)})]
    function.attributes["arg_attrs"] = ArrayAttr(named)
    types = [value.type for value in function.block.args], [value.type for value in return_of(module).operands]
    function.attributes["function_type"] = FunctionType.from_lists(*types)
    return argument


def extract(
    ops: Iterable[Operation], inputs: Sequence[SSAValue], outputs: Sequence[SSAValue], *, locations: bool = False
) -> ModuleOp:
    """A kernel from `inputs` to `outputs`: a module of copies of these operations, which are in a valid order.

    Constants that they read are copied too. Every other value that they read must be an input, or a result of one of
    them.
    """
    builder = GraphBuilder()
    copies: dict[SSAValue, SSAValue] = {value: builder.argument(value.type) for value in inputs}  # type: ignore[arg-type]

    def copy_of(value: SSAValue) -> SSAValue:
        copy = copies.get(value)
        if copy is None:
            owner = value.owner
            assert isinstance(owner, Const), "an extracted operation reads a value that is not an input"
            copy = copies[value] = builder.constant(owner.value)
        return copy

    for op in ops:
        if isinstance(op, Const):
            continue
        copy = operation_class(op.name).create(
            operands=[copy_of(operand) for operand in op.operands],
            result_types=[result.type for result in op.results],
            attributes=op.attributes,
        )
        if locations:
            copy.location = op.location
        builder.append(copy)
        copies.update(zip(op.results, copy.results, strict=True))
    return builder.finish([(copy_of(value), None) for value in outputs])


def canonical_text(module: ModuleOp) -> str:
    """Text for comparing modules: without locations, values renumbered, constants in the order of their first use."""
    function = func_of(module)
    copy = extract(body_ops(module), list(function.block.args), list(return_of(module).operands))
    func_of(copy).attributes.update(function.attributes)
    return print_module(copy, locations=False)

"""The xDSL operation classes: one per row of the table, and the function around them."""

from functools import cache
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FunctionType, ModuleOp, StringAttr
from xdsl.ir import Block, Operation, OpTraits, Region
from xdsl.traits import IsTerminator, Pure

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import ConstantAttr


class CirhOperation(Operation):
    """An operation of the table. All are pure, so that an operation without a reader can be removed."""

    traits = OpTraits(lambda: (Pure(),))


class Const(CirhOperation):
    """A constant; attribute `value`."""

    name = "cirh.Const"

    @property
    def value(self) -> ConstantAttr:
        value: Any = self.attributes["value"]
        return value


class Return(Operation):
    """The last operation of the function, whose operands are the function's results."""

    name = "cirh.return"
    traits = OpTraits(lambda: (IsTerminator(),))


class Func(Operation):
    """The function. `arg_attrs` and `res_attrs` have the dictionaries of its arguments and results."""

    name = "cirh.func"
    traits = OpTraits(lambda: ())

    @property
    def block(self) -> Block:
        return self.regions[0].block

    @property
    def function_type(self) -> FunctionType:
        value: Any = self.attributes["function_type"]
        return value

    @property
    def argument_attributes(self) -> tuple[DictionaryAttr, ...]:
        value: Any = self.attributes["arg_attrs"]
        return tuple(value.data)

    @property
    def result_attributes(self) -> tuple[DictionaryAttr, ...]:
        value: Any = self.attributes["res_attrs"]
        return tuple(value.data)


@cache
def operation_class(name: str) -> type[CirhOperation]:
    """The class of an operation of the table."""
    if name == "cirh.Const":
        return Const
    return type(
        name.replace(".", "_"), (CirhOperation,), {"name": name, "__doc__": f"{name}: see waferbox.cirh.table.lookup."}
    )


# Attributes that are the structure of a Func. All others are printed as its attributes.
FUNC_STRUCTURE = ("sym_name", "function_type", "arg_attrs", "res_attrs")


def make_module(
    block: Block,
    argument_attributes: list[DictionaryAttr],
    result_attributes: list[DictionaryAttr],
    *,
    name: str = "graph",
    attributes: dict[str, Any] | None = None,
) -> ModuleOp:
    """The module of one function with this body, whose last operation is the Return."""
    last = block.last_op
    assert isinstance(last, Return)
    function = Func.create(
        attributes={
            **(attributes or {}),
            "sym_name": StringAttr(name),
            "function_type": FunctionType.from_lists([a.type for a in block.args], [v.type for v in last.operands]),
            "arg_attrs": ArrayAttr(argument_attributes),
            "res_attrs": ArrayAttr(result_attributes),
        },
        regions=[Region(block)],
    )
    return ModuleOp([function])


def func_of(module: ModuleOp) -> Func:
    """The function of a module."""
    operation = module.body.block.first_op
    if not isinstance(operation, Func) or operation.next_op is not None:
        raise CirhError("a module must hold exactly one function")
    return operation


def return_of(module: ModuleOp) -> Return:
    """The Return of the module's function."""
    last = func_of(module).block.last_op
    if not isinstance(last, Return):
        raise CirhError("the function does not end with return")
    return last


def body_ops(module: ModuleOp) -> list[Operation]:
    """The operations of the function in order, without the Return."""
    operations = list(func_of(module).block.ops)
    if not operations or not isinstance(operations[-1], Return):
        raise CirhError("the function does not end with return")
    return operations[:-1]

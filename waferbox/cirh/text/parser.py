"""Parsing CIRH text from untrusted sources: bounded in time and memory, and every refusal is a CirhError.

xDSL's own parser is slow, has no limits, and reads the bits of an infinity as a number. A parsed module has known
operations, values defined before their use, and the types in the text; `verify` checks the rest.
"""

from functools import lru_cache

from xdsl.dialects.builtin import (
    DictionaryAttr,
    FileLineColLoc,
    IntAttr,
    LocationAttr,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue

from waferbox.cirh import CirhError, TextError
from waferbox.cirh.dialect.attributes import DenseAttr, SplatAttr
from waferbox.cirh.dialect.locations import UNKNOWN
from waferbox.cirh.dialect.operations import FUNC_STRUCTURE, Func, Return, func_of, make_module, operation_class
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.table.lookup import REFUSED, spec
from waferbox.cirh.text.parser_attributes import AttributeParser
from waferbox.cirh.text.scanner import MAXIMUM_ITEMS

MAXIMUM_OPERATIONS = 1_000_000


def parse_module(text: str, file: str = "") -> ModuleOp:
    """The module of a text.

    Args:
        text: the text.
        file: its file, whose lines become the locations of operations without one; empty for none.

    Raises:
        CirhError: the text is not that of a module.
    """
    parser = _ModuleParser(text, file)
    try:
        return parser.module()
    except TextError:
        raise
    except CirhError as error:
        raise parser.at_operation(error) from None


# A compile asks several times for the module of the same kernel.
@lru_cache(maxsize=256)
def shared_module(text: str) -> ModuleOp:
    """The module of a text, which others have too: it must not be changed. Raises CirhError as parse_module."""
    return parse_module(text)


class _ModuleParser(AttributeParser):
    """A parser of one module's text."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines = self._counted = 0
        self._begin = 0
        self._values: dict[str, SSAValue] = {}
        self._unresolved: list[tuple[Operation | BlockArgument, str]] = []  # aliases may be defined after their use
        super().__init__(text)

    def at_operation(self, error: CirhError) -> TextError:
        """The error with the line on which the current operation begins."""
        return TextError(f"line {self._text.count(chr(10), 0, self._begin) + 1}: {error}")

    def module(self) -> ModuleOp:
        self._location_aliases()
        self.expect("module")
        self.expect("{")
        module = self._function()
        self.expect("}")
        self._trailing_location(None)
        self._location_aliases()
        if self.kind != "end":
            self.fail("text after the module")
        for target, alias in self._unresolved:
            known = self._aliases.get(alias)
            if known is None:
                self.fail(f"unknown location {alias}")
            target.location = known
        return module

    def _location_aliases(self) -> None:
        while self.kind == "alias":
            name = self.token
            self.advance()
            self.expect("=")
            self.expect("loc")
            self.expect("(")
            self._aliases[name] = self.location()
            self.expect(")")

    def _trailing_location(self, target: Operation | BlockArgument | None) -> None:
        if not self.accept("loc"):
            return
        self.expect("(")
        if self.kind == "alias":
            alias = self.token
            self.advance()
            known = self._aliases.get(alias)
            if target is not None:
                if known is None:
                    self._unresolved.append((target, alias))
                else:
                    target.location = known
        else:
            location: LocationAttr = self.location()
            if target is not None:
                target.location = location
        self.expect(")")

    def _attributes_if_any(self) -> dict[str, Attribute]:
        return self.dictionary() if self.token == "{" and self.kind == "mark" else {}

    def _define(self, name: str, value: SSAValue) -> None:
        if name in self._values:
            self.fail(f"{name} is defined twice")
        self._values[name] = value

    def _function(self) -> ModuleOp:
        self.expect("func")
        name = self.take("symbol")[1:]
        block = Block()
        argument_attributes: list[DictionaryAttr] = []
        result_attributes: list[DictionaryAttr] = []
        result_types: list[Attribute] = []

        def argument() -> None:
            value = self.take("value")
            self.expect(":")
            added = block.insert_arg(self.tensor_type(), len(argument_attributes))
            self._define(value, added)
            argument_attributes.append(DictionaryAttr(self._attributes_if_any()))
            self._trailing_location(added)

        def result() -> None:
            result_types.append(self.tensor_type())
            result_attributes.append(DictionaryAttr(self._attributes_if_any()))

        self.expect("(")
        self.items(")", argument)
        if self.accept("->"):
            if self.accept("("):
                self.items(")", result)
            else:
                result()
        attributes = self.dictionary() if self.accept("attributes") else {}
        if any(reserved in attributes for reserved in FUNC_STRUCTURE):
            self.fail("a reserved attribute of the function")
        self.expect("{")
        operations = self._body()
        self.expect("}")
        block.add_ops(operations)
        if [operand.type for operand in operations[-1].operands] != result_types:
            self.fail("the types of return are not those of the function's results")
        module = make_module(block, argument_attributes, result_attributes, name=name, attributes=attributes)
        function: Func = func_of(module)
        self._trailing_location(function)
        return module

    def _body(self) -> list[Operation]:
        operations: list[Operation] = []
        while True:
            self._begin = self._start
            line = self._line()
            operation = self._return() if self.token == "return" else self._operation()
            operation.location = line
            self._trailing_location(operation)
            operations.append(operation)
            if isinstance(operation, Return):
                return operations
            if len(operations) > MAXIMUM_OPERATIONS:
                self.fail("too many operations")

    def _line(self) -> LocationAttr:
        """The line of the current token."""
        if not self._file:
            return UNKNOWN
        # Counted from the token before: counting from the beginning for each operation would take quadratic time.
        self._lines += self._text.count("\n", self._counted, self._start)
        self._counted = self._start
        return FileLineColLoc(StringAttr(self._file), IntAttr(self._lines + 1), IntAttr(0))

    def _operands(self) -> list[SSAValue]:
        operands: list[SSAValue] = []
        if self.kind != "value":
            return operands
        while True:
            value = self._values.get(self.token)
            if value is None or self.kind != "value":
                self.fail("a value that is not defined before this")
            operands.append(value)
            self.advance()
            if not self.accept(","):
                return operands

    def _types(self) -> list[AnyTensorType]:
        if self.accept("("):
            return self.items(")", self.tensor_type)
        types = [self.tensor_type()]
        while self.accept(","):
            types.append(self.tensor_type())
        return types

    def _check_operand_types(self, operands: list[SSAValue], types: list[AnyTensorType]) -> None:
        if len(types) == 1 and len(operands) > 1:
            types = types * len(operands)
        # Types are interned by their text, so that most comparisons are of an object with itself.
        same = len(types) == len(operands) and all(
            t is o.type or t == o.type for t, o in zip(types, operands, strict=True)
        )
        if not same:
            raise CirhError("the types of operands are not those of their definitions")

    def _return(self) -> Return:
        self.advance()
        operands = self._operands()
        if operands:
            self.expect(":")
            self._check_operand_types(operands, self._types())
        return Return.create(operands=operands)

    def _operation(self) -> Operation:
        named: list[tuple[str, int]] = []
        if self.kind == "value":
            named.append(self._named())
            while self.accept(","):
                named.append(self._named())
            self.expect("=")
        generic = self.kind == "string"
        name = self.take("string")[1:-1] if generic else self.take("word")
        operation = self._constant() if name == "cirh.Const" and not generic else self._table_operation(name, generic)
        count = sum(max(1, packed) for _, packed in named)
        if len(operation.results) != count:
            self.fail(f"{len(operation.results)} results for {count} names")
        names = [name if not packed else f"{name}#{at}" for name, packed in named for at in range(max(1, packed))]
        for value, result in zip(names, operation.results, strict=True):
            self._define(value, result)
        return operation

    def _named(self) -> tuple[str, int]:
        """A name of results with their number: 0 for one result, or 3 for the pack `%20:3`, read as `%20#0` etc."""
        name, _, packed = self.take("value").partition(":")
        if "#" in name or (packed and not 0 < int(packed) <= MAXIMUM_ITEMS):
            self.fail(f"{name[:60]} cannot name results")
        return name, int(packed or 0)

    def _constant(self) -> Operation:
        value = self.attribute()
        if not isinstance(value, (SplatAttr, DenseAttr)) or not isinstance(value.type, TensorType):
            self.fail("cirh.Const takes a dense constant")
        attributes = self._attributes_if_any()
        return operation_class("cirh.Const").create(
            result_types=[value.type], attributes={**attributes, "value": value}
        )

    def _table_operation(self, name: str, generic: bool) -> Operation:
        if name not in REFUSED:  # these are refused by `verify`, whose message has their source
            spec(name)
        if generic:
            self.expect("(")
        operands = self._operands()
        if generic:
            self.expect(")")
        attributes = self._attributes_if_any()
        self.expect(":")
        types = self._types()
        self._check_operand_types(operands, types)
        # With `: T` alone, all operands and the one result have that type.
        results = self._types() if self.accept("->") else types[:1]
        return operation_class(name).create(operands=operands, result_types=results, attributes=attributes)

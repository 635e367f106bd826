"""Printing a module as text of the real client's form, with renumbered values."""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from xdsl.dialects.builtin import (
    ArrayAttr,
    CallSiteLoc,
    DictionaryAttr,
    FileLineColLoc,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    LocationAttr,
    ModuleOp,
    NameLoc,
    NoneAttr,
    StringAttr,
    UnitAttr,
)
from xdsl.ir import Attribute, Operation, SSAValue

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import DenseAttr, SplatAttr, splat
from waferbox.cirh.dialect.locations import UNKNOWN
from waferbox.cirh.dialect.operations import FUNC_STRUCTURE, Const, Return, func_of
from waferbox.cirh.dialect.spec import Format
from waferbox.cirh.dialect.types import dtype, element_attribute, info, tensor_type, type_text
from waferbox.cirh.table.lookup import spec

# Longer constants are printed as bytes in hexadecimal.
LONGEST_LIST = 256
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*\Z")
_DIGITS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 8, torch.float64: 16}
_FLOATS = {element_attribute(kind): kind for kind in _DIGITS}


def print_module(module: ModuleOp, *, locations: bool = True) -> str:
    """The module's text, from which `parse_module` makes an equal module."""
    return _Printer(locations).module(module)


def float_text(value: float, kind: torch.dtype) -> str:
    """Text that reads back as the same bits: six digits where these are enough, bits for infinities and NaN."""
    constant = splat(value, tensor_type((), kind))
    assert isinstance(constant, SplatAttr)
    return _float_text(constant)


def _float_text(constant: SplatAttr) -> str:
    """A float as MLIR prints it: six digits where these give the same bits, else as many as are needed."""
    kind = dtype(constant.type)
    value = float(constant.value)
    if not math.isfinite(value):
        return f"0x{constant.bits:0{kind.itemsize * 2}X}"
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    mantissa, exponent = f"{abs(value):.{_DIGITS[kind]}e}".split("e")
    digits = mantissa.replace(".", "")
    short = f"{sign}{digits[0]}.{digits[1:6]:0<6}e{exponent}"
    if splat(float(short), constant.type) == constant:
        return short
    digits, power = digits.rstrip("0"), int(exponent)
    if -3 <= power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if 0 <= power < len(digits) - 1:
        return f"{sign}{digits[: power + 1]}.{digits[power + 1 :]}"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{'+' if power >= 0 else ''}{power}"


def _escape(text: str) -> str:
    encoded = []
    for byte in text.encode("utf-8", "surrogateescape"):
        plain = 0x20 <= byte < 0x7F and byte not in (0x22, 0x5C)
        encoded.append(chr(byte) if plain else f"\\{byte:02X}")
    return f'"{"".join(encoded)}"'


def _element_text(constant: SplatAttr) -> str:
    kind = dtype(constant.type)
    if kind.is_floating_point:
        return _float_text(constant)
    return str(constant.value).lower()


def _nested(values: Sequence[str], shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"[{', '.join(values)}]"
    part = len(values) // shape[0]
    return f"[{', '.join(_nested(values[i : i + part], shape[1:]) for i in range(0, len(values), part))}]"


def _constant_text(constant: SplatAttr | DenseAttr) -> str:
    if isinstance(constant, SplatAttr):
        return f"dense<{_element_text(constant)}> : {type_text(constant.type)}"
    shape, kind = info(constant.type)
    count = math.prod(shape)
    if not count:
        return f"dense<> : {type_text(constant.type)}"
    if count > LONGEST_LIST:
        return f'dense<"0x{constant.content.hex().upper()}"> : {type_text(constant.type)}'
    scalar = tensor_type((), kind)
    elements = []
    for value in constant.tensor().reshape(-1).tolist():
        element = splat(value, scalar)
        assert isinstance(element, SplatAttr)
        elements.append(_element_text(element))
    if not kind.is_floating_point or all("0x" not in e for e in elements):
        return f"dense<{_nested(elements, shape)}> : {type_text(constant.type)}"
    # The payload of a NaN is kept only as bits.
    return f'dense<"0x{constant.content.hex().upper()}"> : {type_text(constant.type)}'


def attribute_text(value: Attribute) -> str:
    """The text of one attribute value. Raises CirhError for a kind without text."""
    if isinstance(value, (SplatAttr, DenseAttr)):
        return _constant_text(value)
    if isinstance(value, StringAttr):
        return _escape(value.data)
    if isinstance(value, IntegerAttr) and isinstance(value.type, IntegerType):
        width = value.type.width.data
        return str(bool(value.value.data)).lower() if width == 1 else f"{value.value.data} : i{width}"
    if isinstance(value, FloatAttr):
        kind = _FLOATS[value.type]
        return f"{float_text(value.value.data, kind)} : {'bf' if kind is torch.bfloat16 else 'f'}{kind.itemsize * 8}"
    if isinstance(value, DictionaryAttr):
        return dictionary_text(value.data)
    if isinstance(value, ArrayAttr):
        return f"[{', '.join(map(attribute_text, value))}]"
    if isinstance(value, UnitAttr):
        return "unit"
    raise CirhError(f"an attribute that CIRH text has no form for: {value}")


def dictionary_text(attributes: Mapping[str, Attribute]) -> str:
    """`{a = 1 : i64, b}` in the order of names."""
    items = []
    for name in sorted(attributes):
        shown = name if _PLAIN.match(name) else _escape(name)
        value = attributes[name]
        items.append(shown if isinstance(value, UnitAttr) else f"{shown} = {attribute_text(value)}")
    return f"{{{', '.join(items)}}}"


class _Printer:
    """Prints one module. Names of values and numbers of locations are assigned on first use."""

    def __init__(self, locations: bool) -> None:
        self._locations = locations
        self._names: dict[SSAValue, str] = {}
        self._numbers: dict[LocationAttr, int] = {UNKNOWN: 0}
        self._numbers_by_identity: dict[int, int] = {id(UNKNOWN): 0}
        self._taken: set[str] = set()
        self._repeats = 0
        self._values = 0

    def module(self, module: ModuleOp) -> str:
        function = func_of(module)
        block = function.block
        arguments = []
        for index, (argument, attributes) in enumerate(zip(block.args, function.argument_attributes, strict=True)):
            self._names[argument] = f"%arg{index}"
            notes = f" {dictionary_text(attributes.data)}" if attributes.data else ""
            arguments.append(
                f"%arg{index}: {type_text(argument.type)}{notes}{self._argument_location(argument.location)}"
            )
        results = [
            f"{type_text(type)}{f' {dictionary_text(notes.data)}' if notes.data else ''}"
            for type, notes in zip(function.function_type.outputs.data, function.result_attributes, strict=True)
        ]
        rest = {k: v for k, v in function.attributes.items() if k not in FUNC_STRUCTURE}
        keyword = f" attributes {dictionary_text(rest)}" if rest else ""
        name = function.attributes["sym_name"]
        assert isinstance(name, StringAttr)
        body = [f"    {self._operation(op)}{self._location(op.location)}" for op in block.ops]
        lines = [
            "module  {",
            f"  func @{name.data}({', '.join(arguments)}) -> ({', '.join(results)}){keyword} {{",
            *body,
            f"  }}{self._location(function.location)}",
            f"}}{self._location(UNKNOWN)}",
        ]
        if self._locations:
            aliases = [f"#loc{number} = loc({_location_text(loc)})" for loc, number in self._numbers.items()]
            lines = [aliases[0], *lines, *aliases[1:]]
        return "\n".join(lines) + "\n"

    def _argument_location(self, location: LocationAttr) -> str:
        if not self._locations:
            return ""
        return " loc(unknown)" if location == UNKNOWN else self._location(location)

    def _location(self, location: LocationAttr) -> str:
        if not self._locations:
            return ""
        number = self._numbers_by_identity.get(id(location))
        if number is None:
            number = self._numbers.setdefault(location, len(self._numbers))
            self._numbers_by_identity[id(location)] = number
        return f" loc(#loc{number})"

    def _name(self, value: SSAValue) -> str:
        name = self._names.get(value)
        if name is None:
            raise CirhError("a value is used before the operation that makes it")
        return name

    def _results(self, op: Operation) -> str:
        row = None if isinstance(op, Const) else spec(op.name)
        if row is not None and row.results is None and len(op.results) > 1:
            pack, self._values = f"%{self._values}", self._values + 1
            self._names.update((result, f"{pack}#{index}") for index, result in enumerate(op.results))
            return f"{pack}:{len(op.results)}"
        named: Sequence[str] = ("cst",) if row is None else row.result_names
        for index, result in enumerate(op.results):
            if index >= len(named):
                self._names[result] = f"%{self._values}"
                self._values += 1
            elif named[index] not in self._taken:
                self._taken.add(named[index])
                self._names[result] = f"%{named[index]}"
            else:
                self._names[result] = f"%{named[index]}_{self._repeats}"
                self._repeats += 1
        return ", ".join(self._names[result] for result in op.results)

    def _operation(self, op: Operation) -> str:
        if isinstance(op, Const):
            notes = {k: v for k, v in op.attributes.items() if k != "value"}
            suffix = f" {dictionary_text(notes)}" if notes else ""
            return f"{self._results(op)} = cirh.Const {_constant_text(op.value)}{suffix}"
        operands = ", ".join(self._name(operand) for operand in op.operands)
        types = ", ".join(type_text(operand) for operand in op.operands)
        if isinstance(op, Return):
            return f"return {operands} : {types}" if operands else "return"
        made = ", ".join(type_text(result) for result in op.results)
        if len(op.results) != 1:
            made = f"({made})"
        attributes = f" {dictionary_text(op.attributes)}" if op.attributes else ""
        format = spec(op.name).format
        results = self._results(op)
        head = f"{results} = {op.name} {operands}" if operands else f"{results} = {op.name}"
        # The short forms have one operand type, which is not enough for operands of several types.
        if format in (Format.SAME, Format.CAST) and len({operand.type for operand in op.operands}) > 1:
            format = Format.FUNCTIONAL
        if format is Format.SAME:
            return f"{head}{attributes} : {made}"
        if format is Format.CAST:
            return f"{head}{attributes} : {type_text(op.operands[0])} -> {made}"
        if format is Format.GENERIC:
            head = f'{results} = "{op.name}"({operands})'
        return f"{head}{attributes} : ({types}) -> {made}"


def _location_text(location: Attribute) -> str:
    if isinstance(location, FileLineColLoc):
        return f"{_escape(location.filename.data)}:{location.line.data}:{location.column.data}"
    if isinstance(location, NameLoc):
        inner = location.location
        return _escape(location.desc.data) + ("" if isinstance(inner, NoneAttr) else f"({_location_text(inner)})")
    if isinstance(location, CallSiteLoc):
        return f"callsite({_location_text(location.callee)} at {_location_text(location.caller)})"
    return "unknown"

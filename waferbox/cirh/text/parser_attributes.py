"""Parsing types, constants, attributes and locations."""

import math
import re
from typing import Any

import torch
from xdsl.dialects.builtin import (
    ArrayAttr,
    CallSiteLoc,
    DictionaryAttr,
    FileLineColLoc,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    IntegerType,
    LocationAttr,
    NameLoc,
    NoneAttr,
    StringAttr,
    UnitAttr,
    f64,
    i64,
)
from xdsl.ir import Attribute

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import ConstantAttr, bits_of, constant_of_bytes, splat
from waferbox.cirh.dialect.elements import MAXIMUM_RANK, element_dtype
from waferbox.cirh.dialect.locations import UNKNOWN
from waferbox.cirh.dialect.types import AnyTensorType, element_attribute, info, tensor_type
from waferbox.cirh.text.scanner import Scanner, unescape

MAXIMUM_DEPTH = 64
MAXIMUM_LOCATION_DEPTH = 256
MAXIMUM_NUMBER = 40
MAXIMUM_LIST_TEXT = 1 << 23
MAXIMUM_DENSE = 1 << 26
# Attributes without strings, nested dictionaries and comments. Most operations have those of another one.
_PLAIN_DICTIONARY = re.compile(r"\{[^{}\"/\n]{0,1024}+\}")
_PLAIN_DENSE = re.compile(r"<[^<>\[\]\"/\n]{0,64}+>\s{0,8}+:\s{0,8}+(?:tensor|vector)<[0-9a-z]++>")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]++|\d++(?:\.\d*+)?(?:[eE][+-]?\d++)?)\Z")
_SCALARS = frozenset(("i1", "i8", "i16", "i32", "i64", "ui8", "f16", "bf16", "f32", "f64"))


def _from_bits(bits: int, dtype: torch.dtype) -> bytes:
    try:
        return bits.to_bytes(dtype.itemsize, "little")
    except OverflowError:
        raise CirhError(f"0x{bits:X} has more bits than {dtype}") from None


class AttributeParser(Scanner):
    """A scanner that also reads types, constants, attributes and locations."""

    def __init__(self, text: str) -> None:
        self._known_types: dict[str, AnyTensorType] = {}
        self._known_dictionaries: dict[str, dict[str, Attribute]] = {}
        self._known_constants: dict[str, ConstantAttr] = {}
        self._aliases: dict[str, LocationAttr] = {}
        super().__init__(text)

    def tensor_type(self, *, may_be_vector: bool = False) -> AnyTensorType:
        """A tensor type. may_be_vector: whether `vector<...>` may stand for it."""
        if self.kind != "type" or (self.token.startswith("vector") and not may_be_vector):
            self.fail("expected a tensor type")
        known = self._known_types.get(self.token)
        if known is None:
            *sizes, element = self.token[7:-1].split("x")
            if (
                element not in _SCALARS
                or len(sizes) > MAXIMUM_RANK
                or not all(s.isdigit() and len(s) < 16 for s in sizes)
            ):
                self.fail("not a tensor type")
            known = self._known_types[self.token] = tensor_type([int(size) for size in sizes], element_dtype(element))
        self.advance()
        return known

    def number(self) -> tuple[int | float, bool]:
        """A number, and whether it is written as bits."""
        token = self.take("number")
        if len(token) > MAXIMUM_NUMBER:
            self.fail(f"a number of {len(token)} characters")
        if token[:2] in ("0x", "0X"):
            return int(token, 16), True
        return (int(token) if token.lstrip("-").isdigit() else float(token)), False

    def dense(self) -> ConstantAttr:
        """`dense<1.0>`, `dense<[1, 2]>`, `dense<"0x0102">` or `dense<>`, and a type."""
        plain = self.text_here(_PLAIN_DENSE)
        known = self._known_constants.get(plain)
        if known is not None:
            self.step_over(plain)
            return known
        constant = self._dense()
        if plain:
            self._known_constants[plain] = constant
        return constant

    def _dense(self) -> ConstantAttr:
        self.longest_string = MAXIMUM_DENSE
        self.expect("<")
        if self.kind == "string":
            content = self.token[1:-1]
            self.longest_string = 1 << 16
            self.advance()
            return self._dense_end(lambda type: constant_of_bytes(type, self._bytes(content)))
        self.longest_string = 1 << 16
        if self.token == ">":
            return self._dense_end(lambda type: constant_of_bytes(type, b""))
        if self.token != "[":
            elements = [self.token]
            if self.kind != "number" and self.token not in ("true", "false"):
                self.fail("expected a number")
            self.advance()
        else:
            elements = [e.strip() for e in self.body_until(">", MAXIMUM_LIST_TEXT).translate(_BRACKETS).split(",")]
        return self._dense_end(lambda type: self._dense_of(type, elements))

    def _dense_end(self, make: Any) -> ConstantAttr:
        self.expect(">")
        self.expect(":")
        type = self.tensor_type(may_be_vector=True)
        try:
            constant: ConstantAttr = make(type)
        except CirhError as error:
            self.fail(str(error))
        return constant

    def _bytes(self, text: str) -> bytes:
        try:
            if not text.startswith("0x"):
                raise ValueError
            return bytes.fromhex(text[2:])
        except ValueError:
            raise CirhError("a dense constant's string is not hexadecimal") from None

    def _dense_of(self, type: AnyTensorType, elements: list[str]) -> ConstantAttr:
        shape, dtype = info(type)
        if len(elements) != 1 and len(elements) != math.prod(shape):
            raise CirhError(f"{len(elements)} values for {math.prod(shape)} elements")
        if len(elements) == 1:
            value = self._element(elements[0], dtype)
            return constant_of_bytes(type, value) if isinstance(value, bytes) else splat(value, type)
        values = [self._element(element, dtype) for element in elements]
        if any(isinstance(value, bytes) for value in values):
            parts = [v if isinstance(v, bytes) else _from_bits(bits_of(v, dtype), dtype) for v in values]
            return constant_of_bytes(type, b"".join(parts))
        try:
            tensor = torch.tensor(values, dtype=dtype)
        except (RuntimeError, OverflowError, ValueError, TypeError) as error:
            raise CirhError(f"the values are not of the type's elements: {error}") from None
        return constant_of_bytes(type, tensor.view(torch.uint8).numpy().tobytes())

    def _element(self, text: str, dtype: torch.dtype) -> int | float | bool | bytes:
        if text in ("true", "false"):
            return text == "true"
        if len(text) > MAXIMUM_NUMBER or not _NUMBER.match(text):
            raise CirhError(f"{text[:40]!r} is not a number")
        if text[:2] in ("0x", "0X"):
            bits = int(text, 16)
            return _from_bits(bits, dtype) if dtype.is_floating_point else bits
        if dtype.is_floating_point:
            return float(text)
        if not text.lstrip("-").isdigit():
            raise CirhError(f"{text} is not an integer")
        return int(text)

    def attribute(self, depth: int = 0) -> Attribute:
        """An attribute's value."""
        if depth > MAXIMUM_DEPTH:
            self.fail("attributes nested too deeply")
        if self.kind == "string":
            token = self.token
            self.advance()
            return StringAttr(unescape(token))
        if self.kind == "number":
            return self._number_attribute()
        if self.token in ("true", "false"):
            value = self.token == "true"
            self.advance()
            return _TRUE if value else _FALSE
        if self.token == "dense":
            self.advance()
            return self.dense()
        if self.token == "unit":
            self.advance()
            return UnitAttr()
        if self.token == "{":
            return DictionaryAttr(self.dictionary(depth + 1))
        if self.accept("["):
            return ArrayAttr(self.items("]", lambda: self.attribute(depth + 1)))
        self.fail("expected an attribute")

    def _number_attribute(self) -> Attribute:
        value, is_bits = self.number()
        name = ""
        if self.accept(":"):
            name = self.take("word")
            if name not in _SCALARS:
                self.fail(f"{name!r} is not an element type")
        dtype = element_dtype(name) if name else (torch.int64 if isinstance(value, int) else torch.float64)
        if dtype.is_floating_point:
            if is_bits:
                assert isinstance(value, int)
                constant = constant_of_bytes(tensor_type((1,), dtype), _from_bits(value, dtype))
                value = constant.tensor().item()
            type: Any = element_attribute(dtype) if name else f64
            return FloatAttr(float(value), type)
        if not isinstance(value, int):
            self.fail(f"{value} is not an integer")
        type = element_attribute(dtype) if name else i64
        assert isinstance(type, IntegerType)
        width = type.width.data
        if not -(1 << (width - 1)) <= value < 1 << width or (is_bits and value >> width):
            self.fail(f"{value} does not fit {type}")
        return IntegerAttr(value, type, truncate_bits=True)

    def dictionary(self, depth: int = 0) -> dict[str, Attribute]:
        """`{a = 1 : i64, b}`."""
        plain = "" if depth else self.text_here(_PLAIN_DICTIONARY)
        known = self._known_dictionaries.get(plain)
        if known is not None:
            self.step_over(plain)
            return known.copy()
        self.expect("{")
        found: dict[str, Attribute] = {}

        def entry() -> None:
            name = unescape(self.take("string")) if self.kind == "string" else self.take("word")
            if name in found:
                self.fail(f"attribute {name!r} is given twice")
            found[name] = self.attribute(depth) if self.accept("=") else UnitAttr()

        self.items("}", entry)
        if plain:
            self._known_dictionaries[plain] = found.copy()
        return found

    def location(self, depth: int = 0) -> LocationAttr:
        """The location in the parentheses of `loc(...)`."""
        if depth > MAXIMUM_LOCATION_DEPTH:
            self.fail("locations nested too deeply")
        if self.kind == "alias":
            alias = self.token
            self.advance()
            return self._aliases.get(alias, UNKNOWN)
        if self.kind == "string":
            name = unescape(self.take("string"))
            if self.accept(":"):
                line = self._position()
                self.expect(":")
                return FileLineColLoc(StringAttr(name), IntAttr(line), IntAttr(self._position()))
            inner: LocationAttr | None = None
            if self.accept("("):
                inner = self.location(depth + 1)
                self.expect(")")
            return NameLoc(StringAttr(name), inner if inner is not None else NoneAttr())
        if self.accept("unknown"):
            return UNKNOWN
        self.expect("callsite")
        self.expect("(")
        callee = self.location(depth + 1)
        self.expect("at")
        caller = self.location(depth + 1)
        self.expect(")")
        return CallSiteLoc(callee, caller)

    def _position(self) -> int:
        value, is_bits = self.number()
        if is_bits or not isinstance(value, int) or not 0 <= value < 1 << 31:
            self.fail("not a line or column")
        return value


_BRACKETS = str.maketrans("", "", "[]")
_TRUE = IntegerAttr(1, IntegerType(1))
_FALSE = IntegerAttr(0, IntegerType(1))

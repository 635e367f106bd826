"""The form of a row of the table, and the key and the result of preparing an operation."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue, ConstantAttr
from waferbox.cirh.dialect.types import TensorInfo


class Format(Enum):
    """The form of the text after an operation's attributes."""

    SAME = "x, y {..} : T"
    CAST = "x, y {..} : T -> U"
    FUNCTIONAL = "x, y {..} : (T, U) -> V"
    GENERIC = '"name"(x, y) {..} : (T, U) -> V'


class Count(Enum):
    """The number of operands that stand for one tensor argument."""

    ONE = "one"
    OPTIONAL = "none or one"
    LIST = "any number"


class Kind(Enum):
    """The plain Python type of an attribute."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    NUMBER = "bool, int or float"
    STRING = "str"
    INTS = "list of int"
    BOOLS = "list of bool"
    FLOATS = "list of float"
    DTYPE = 'name of an element type, such as "f32"'


class Typed(Enum):
    """Whether the result types are part of an operation (Reshape) or follow from its operands and attributes (Add)."""

    NEVER = "inferred"
    OPTIONAL = "inferred, or one of several that are possible"
    REQUIRED = "given"


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """A tensor argument. A static one must be a Const: its value is part of the operation, not an input of its call."""

    name: str
    count: Count = Count.ONE
    static: bool = False


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """An attribute of an operation."""

    name: str
    kind: Kind
    required: bool = True


@dataclass(frozen=True, slots=True)
class Site:
    """All that determines the execution of one operation. It is the key under which inferred types are cached."""

    name: str
    operands: tuple[TensorInfo, ...]
    attributes: tuple[tuple[str, AttrValue], ...] = ()  # sorted by name, lists as tuples
    results: tuple[TensorInfo, ...] = ()  # given result types, of typed operations
    statics: tuple[ConstantAttr, ...] = ()  # values of the static operands, in order
    segments: tuple[int, ...] = ()  # number of operands of each tensor argument

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        for key, value in self.attributes:
            if key == name:
                return value
        return default

    @property
    def result(self) -> TensorInfo:
        """The one given result type."""
        if len(self.results) != 1:
            raise CirhError(f"{self.name}: its result type must be given (types=[...])")
        return self.results[0]


Tensors: TypeAlias = Any  # one tensor, or a tuple or list of them


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared torch call.

    `function` takes the run-time operands; `out`, if there is one, takes `out=` too: a tensor, or of several results a
    sequence of a tensor or None for each.
    """

    function: Callable[..., Tensors]
    out: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One row of the table."""

    name: str
    operands: tuple[OperandSpec, ...]
    results: int | None  # None: as many as inferred
    format: Format
    attributes: tuple[AttributeSpec, ...]
    prepare: Callable[[Site], Call]
    typed: Typed = Typed.NEVER
    pointwise: bool = False  # works element by element; operands of rank 0 may stand for whole ones
    factory: bool = False  # has no tensor operands, so `function` takes device= too
    random: bool = False  # draws random numbers, so two equal operations are never joined
    rule: Callable[[Site], tuple[TensorInfo, ...] | None] | None = (
        None  # its result types; see waferbox.cirh.table.rules
    )
    result_names: tuple[str, ...] = ()  # names of several results in the real client's text
    unread: tuple[int, ...] = ()  # results of unknown meaning, which no operation may read

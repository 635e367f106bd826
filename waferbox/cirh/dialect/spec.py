"""What the table says of an operation."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue, ConstantAttr
from waferbox.cirh.dialect.types import TensorInfo


class Format(Enum):
    """The text after an operation's attributes."""

    SAME = "x, y {..} : T"
    CAST = "x, y {..} : T -> U"
    FUNCTIONAL = "x, y {..} : (T, U) -> V"
    GENERIC = '"name"(x, y) {..} : (T, U) -> V'


class Count(Enum):
    """How many operands stand for one tensor argument."""

    ONE = "one"
    OPTIONAL = "none or one"
    LIST = "any number"


class Kind(Enum):
    """Kinds of attributes, in plain Python's terms."""

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
    """Whether the result types are part of what an operation says (Reshape) or follow from the rest (Add)."""

    NEVER = "inferred"
    OPTIONAL = "inferred, or one of several that are possible"
    REQUIRED = "given"


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """A tensor argument. A static one must be a Const: its value is part of the operation, not an input at run time."""

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
    """All that decides how one operation is executed: the key under which its inference is kept."""

    name: str
    operands: tuple[TensorInfo, ...]
    attributes: tuple[tuple[str, AttrValue], ...] = ()  # sorted by name, lists as tuples
    results: tuple[TensorInfo, ...] = ()  # given result types, of operations that are typed
    statics: tuple[ConstantAttr, ...] = ()  # values of the static operands, in order
    segments: tuple[int, ...] = ()  # operands per tensor argument

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
    """A prepared torch call. `function` takes the run-time operands; `out`, where there is one, also takes `out=`."""

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
    pointwise: bool = False  # element by element; operands of rank 0 may stand for whole ones
    factory: bool = False  # no tensor operands: `function` also takes device=
    random: bool = False  # draws random numbers: two such operations are never one
    rule: Callable[[Site], tuple[TensorInfo, ...] | None] | None = (
        None  # its result types; see waferbox.cirh.table.rules
    )
    result_names: tuple[str, ...] = ()  # of several results, as the real client's text calls them
    unread: tuple[int, ...] = ()  # results that nothing may read: what they are is not known

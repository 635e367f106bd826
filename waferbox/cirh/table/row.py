"""Functions that make rows of the table."""

from collections.abc import Callable
from typing import Any

from waferbox.cirh.dialect.spec import AttributeSpec, Call, Count, Format, Kind, OperandSpec, OpSpec, Site, Typed
from waferbox.cirh.table import rules


def _operands(text: str) -> tuple[OperandSpec, ...]:
    """Parses operands: `x` is one, `x?` an optional, `x*` a list, and `x!` a static one."""
    counts = {"?": Count.OPTIONAL, "*": Count.LIST}
    return tuple(OperandSpec(w.rstrip("?*!"), counts.get(w[-1], Count.ONE), w.endswith("!")) for w in text.split())


def _attributes(text: str) -> tuple[AttributeSpec, ...]:
    """Parses attributes, such as `axis=INT`, or `epsilon=FLOAT?`, which may be absent."""
    pairs = (word.split("=") for word in text.split())
    return tuple(AttributeSpec(name, Kind[kind.rstrip("?")], not kind.endswith("?")) for name, kind in pairs)


def add_row(
    rows: dict[str, OpSpec],
    name: str,
    operands: str,
    prepare: Callable[[Site], Call],
    *,
    attributes: str = "",
    results: int | None = 1,
    format: Format = Format.FUNCTIONAL,
    typed: Typed = Typed.NEVER,
    pointwise: bool = False,
    factory: bool = False,
    random: bool = False,
    rule: rules.Rule | None = None,
    result_names: str = "",
    unread: tuple[int, ...] = (),
) -> None:
    """Adds the row of cirh.<name>, with operands and attributes in the syntax of `_operands` and `_attributes`."""
    assert f"cirh.{name}" not in rows
    rows[f"cirh.{name}"] = OpSpec(
        name=f"cirh.{name}",
        operands=_operands(operands),
        results=results,
        format=format,
        attributes=_attributes(attributes),
        prepare=prepare,
        typed=typed,
        pointwise=pointwise,
        factory=factory,
        random=random,
        rule=rule,
        result_names=tuple(result_names.split()),
        unread=unread,
    )


def always(function: Any, out: Any = None) -> Callable[[Site], Call]:
    """A function that prepares the same call at every site. `out`: the function that takes `out=`, if it differs."""
    call = Call(function, out or function)
    return lambda site: call

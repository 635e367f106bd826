"""Helpers for patterns: the operation that makes a value, and the readers of a value."""

from collections.abc import Callable, Collection, Iterator

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.passes.dce import eliminate_dead_code
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr, attrs
from waferbox.cirh.dialect.operations import Const, body_ops


def fuse_each(module: ModuleOp, roots: Collection[str], fuse: Callable[[Operation], bool]) -> bool:
    """Tries a pattern on each operation that it may end with, last first, then drops dead code.

    Returns:
        Whether the pattern occurred.
    """
    changed = False
    for op in reversed(body_ops(module)):
        if op.name in roots and any(result.uses for result in op.results):
            changed = fuse(op) or changed
    if changed:
        eliminate_dead_code(module)
    return changed


def made_by(value: SSAValue, *names: str) -> Operation | None:
    """The operation that makes a value, if it has one of these names."""
    owner = value.owner
    return owner if isinstance(owner, Operation) and owner.name in names else None


def commuted(op: Operation) -> Iterator[tuple[SSAValue, SSAValue]]:
    """The two operands, in both orders."""
    left, right = op.operands
    yield left, right
    yield right, left


def number(value: SSAValue) -> float | None:
    """The number of a constant of equal elements; None for other values."""
    owner = value.owner
    return float(owner.value.value) if isinstance(owner, Const) and isinstance(owner.value, SplatAttr) else None


def broadcast_dims(op: Operation) -> list[int]:
    """The dimensions of a broadcast's result that those of its source become."""
    dims: list[int] = attrs(op)["broadcast_dimensions"]  # type: ignore[assignment]
    return dims


def broadcast_source(value: SSAValue, dims: Collection[int]) -> SSAValue | None:
    """The source of a broadcast, if its dimensions become `dims`; None for other values."""
    op = made_by(value, "cirh.BroadcastInDim")
    return op.operands[0] if op is not None and attrs(op)["broadcast_dimensions"] == list(dims) else None


def are_private(inner: Collection[Operation], root: Operation) -> bool:
    """Whether only the pattern itself reads the values inside it, so that it can be removed with its root."""
    within = {*inner, root}
    return all(use.operation in within for op in inner for result in op.results for use in result.uses)


def same_float(*values: SSAValue) -> bool:
    """Whether all values have the same floating-point type."""
    dtypes = {types.dtype(value) for value in values}
    return len(dtypes) == 1 and dtypes.pop().is_floating_point

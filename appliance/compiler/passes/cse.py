"""Common subexpressions: equal operations on equal values are replaced by the first of them, within a layer.

They are not joined across layers. A mask that the first layer made for all would give it another kernel than the other
layers, and would have to be kept in memory for them.
"""

from collections.abc import Iterator

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Operation, SSAValue

from appliance.compiler.core.rewriter import erase, layer_of
from waferbox.cirh.dialect.attributes import is_annotation
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const, Return, body_ops
from waferbox.cirh.table.lookup import spec

Key = tuple[object, ...]


def join_common_subexpressions(module: ModuleOp) -> bool:
    """Joins equal constants and, within a layer and pass, equal operations. Returns whether there were any."""
    changed = False
    first: dict[Key, Operation] = {}
    for op, place in _placed(module):
        # Two random operations with equal operands would be joined although they come from two calls.
        if not isinstance(op, Const) and spec(op.name).random:
            continue
        key = _key(op) if isinstance(op, Const) else (*_key(op), *place)
        known = first.setdefault(key, op)
        # Each result of a step must remain a value of its own, as each is stored in its own buffer.
        if known is op or (not isinstance(op, Const) and _is_result(op)):
            continue
        for result, same in zip(op.results, known.results, strict=True):
            result.replace_all_uses_with(same)
        erase(op)
        changed = True
    return changed


def _placed(module: ModuleOp) -> Iterator[tuple[Operation, tuple[str, bool, bool]]]:
    """Operations with layer, pass and whether they are a metric's, which mixed precision leaves in float32.

    An operation outside all modules belongs to the layer before it.
    """
    layer = ""
    for op in body_ops(module):
        source = source_of(op)
        layer = layer_of(source.module) or layer
        yield op, (layer, source.backward, source.metric)


def _key(op: Operation) -> Key:
    operands: tuple[SSAValue, ...] = tuple(op.operands)
    attributes: frozenset[tuple[str, Attribute]] = frozenset(
        (name, value) for name, value in op.attributes.items() if not is_annotation(name)
    )
    return op.name, operands, attributes, tuple(result.type for result in op.results)


def _is_result(op: Operation) -> bool:
    return any(isinstance(use.operation, Return) for result in op.results for use in result.uses)

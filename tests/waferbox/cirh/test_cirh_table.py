"""The table: no operation lacks a column, and what cannot be is refused."""

import pytest
import torch
from cirh_examples import examples

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.dialect.spec import Typed
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.table import aten as table_aten
from waferbox.cirh.table import lookup as table
from waferbox.cirh.table import rules

EXAMPLES = list(examples())


def test_every_operation_has_an_example() -> None:
    executed = {example.name for example in EXAMPLES}
    assert set(table.names()) == executed


def test_no_operation_lacks_a_column() -> None:
    for name in table.names():
        row = table.spec(name)
        assert row.name == name
        assert row.results is None or row.results >= 1, name
        assert callable(row.prepare), name
        assert len({operand.name for operand in row.operands}) == len(row.operands), name
        assert len({attribute.name for attribute in row.attributes}) == len(row.attributes), name
        assert not (row.pointwise and row.factory), name
        assert row.results is not None or row.typed is not Typed.REQUIRED, name


def test_aten_operations_neither_write_nor_draw() -> None:
    for name in table_aten.ALLOWED:
        base, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, base), overload or "default")
        assert not function._schema.is_mutable, name
        assert torch.Tag.nondeterministic_seeded not in function.tags, name


def test_every_rule_decides_at_least_one_example() -> None:
    decided = {
        example.name
        for example in EXAMPLES
        for op in body_ops(example.module())
        if not isinstance(op, Const) and (rule := table.spec(op.name).rule) is not None and rule(table.site_of(op))
    }
    assert decided >= set(rules.ATEN) | {name for name, row in table.ROWS.items() if row.rule is not None}


@pytest.mark.parametrize("name", ["cirh.Nothing", "aten.add_", "aten.system", "os.system", "aten.randn", ""])
def test_unknown_operations_are_refused(name: str) -> None:
    with pytest.raises(CirhError, match="unknown operation"):
        table.spec(name)


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "message"),
    [
        ("cirh.Add", [(3, 4), (4,)], {}, "broadcast them first"),
        ("cirh.Add", [(1,), ()], {}, "broadcast them first"),
        ("cirh.Add", [(3,)], {}, "takes x, y; 1 operands"),
        ("cirh.MatMul", [(3, 4), (3, 4)], {}, "cirh.MatMul"),
        ("cirh.MatMul", [(3, 4, 1), (3, 4)], {}, "must be matrices"),
        ("cirh.MatMul", [(3, 4), (4, 3)], {"transpose": True}, "no attribute 'transpose'"),
        ("cirh.MatMul", [(3, 4), (4, 3)], {"transpose_a": 1}, "is not a bool"),
        ("cirh.Compare", [(3,), (3,)], {}, "'comparison_direction' is missing"),
        ("cirh.Compare", [(3,), (3,)], {"comparison_direction": "GTE"}, "not 'GTE'"),
        ("cirh.Reduce", [(3,)], {"dimensions": [1], "reduce_kind": "ADD"}, "dimension 1"),
        ("cirh.Reduce", [(3,)], {"dimensions": [0], "reduce_kind": "AVG"}, "'AVG'"),
        ("cirh.Reduce", [(3,)], {"dimensions": [0], "keep_dims": [1], "reduce_kind": "ADD"}, "keep_dims"),
        ("cirh.Reshape", [(3,)], {}, "result type must be given"),
        ("cirh.Transpose", [(3, 4), (2,)], {}, "must be a constant"),
        ("cirh.RandomBernoulli", [()], {"probability": 0.5}, "result type must be given"),
        ("aten.addmm", [(7,), (3, 4), (4, 5)], {}, "aten.addmm"),
        ("aten.stack", [], {}, "aten.stack"),
        ("aten.mean.dim", [(3,)], {"dim": [5]}, "aten.mean.dim"),
    ],
)
def test_impossible_operations_are_refused(
    name: str, shapes: list[tuple[int, ...]], attributes: dict[str, int], message: str
) -> None:
    builder = GraphBuilder()
    operands = [builder.argument(tensor_type(shape, torch.float32)) for shape in shapes]
    with pytest.raises(CirhError, match=message):
        builder.op(name, operands, attributes)

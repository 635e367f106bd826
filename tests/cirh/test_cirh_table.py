"""The table: no operation lacks a column, each infers the types that it makes, and fast calls are the same calls."""

import pytest
import torch
from cirh_examples import Example, examples

from cirh.dialect.errors import CirhError
from cirh.dialect.operations import Const, body_ops, return_of
from cirh.dialect.spec import Typed
from cirh.dialect.types import TensorInfo, element_dtype, info, tensor_type
from cirh.execution.kernel import Kernel
from cirh.modules.builder import GraphBuilder
from cirh.table import aten as table_aten
from cirh.table import lookup as table
from cirh.table import rows as table_cirh
from cirh.table import rules

EXAMPLES = list(examples())
# Known in text only: verification refuses them.
TEXT_ONLY = {
    "cirh.Convolution",
    "cirh.BiasAdd",
    "cirh.BiasAddGrad",
    "cirh.FusedBatchNorm",
    "cirh.FusedBatchNormGrad",
    "cirh.Pool",
}


def test_every_operation_has_an_example() -> None:
    executed = {example.name for example in EXAMPLES}
    assert set(table.names()) - TEXT_ONLY == executed


@pytest.mark.parametrize("name", sorted(table.names()))
def test_no_operation_lacks_a_column(name: str) -> None:
    row = table.spec(name)
    assert row.name == name
    assert row.results is None or row.results >= 1
    assert callable(row.prepare)
    assert len({operand.name for operand in row.operands}) == len(row.operands)
    assert len({attribute.name for attribute in row.attributes}) == len(row.attributes)
    assert not (row.pointwise and row.factory)
    if row.typed is Typed.REQUIRED:
        assert row.results is not None


@pytest.mark.parametrize("name", sorted(table_aten.ALLOWED))
def test_aten_operations_neither_write_nor_draw(name: str) -> None:
    base, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")
    assert not function._schema.is_mutable
    assert torch.Tag.nondeterministic_seeded not in function.tags


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_inferred_types_are_what_the_operation_makes(example: Example) -> None:
    module = example.module()
    declared = [info(value) for value in return_of(module).operands]
    results = Kernel.build(module)(example.inputs())
    assert [(tuple(r.shape), r.dtype) for r in results] == [tuple(type) for type in declared]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_inputs_are_not_written(example: Example) -> None:
    before = [tensor.clone() for tensor in example.inputs()]
    Kernel.build(example.module())(example.inputs())
    for tensor, copy in zip(example.inputs(), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the last dimension first in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


# In a narrow element type, kernels for other strides round elsewhere.
WIDE = [e for e in EXAMPLES if all(operand.dtype is not torch.bfloat16 for operand in e.operands)]


@pytest.mark.parametrize("example", WIDE, ids=lambda e: e.name)
def test_results_do_not_depend_on_how_operands_lie_in_memory(example: Example) -> None:
    kernel = Kernel.build(example.module())
    expected = kernel(example.inputs())
    for change in (turned, with_gaps):
        results = kernel([change(tensor) for tensor in example.inputs()])
        torch.testing.assert_close(results, expected, equal_nan=True)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name.startswith("aten.")], ids=lambda e: e.name)
def test_aten_calls_are_those_of_their_overload(example: Example) -> None:
    """The prepared call, which may be a builtin function, gives the bits of the overload called by name."""
    (op,) = (op for op in body_ops(example.module()) if not isinstance(op, Const))
    base, _, overload = example.name.removeprefix("aten.").partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")
    site = table.site_of(op)
    operands = list(example.operands)
    named: dict[str, object] = {}
    for spec, count in zip(table.spec(op.name).operands, site.segments, strict=True):
        part, operands = operands[:count], operands[count:]
        named[spec.name] = part if spec.count.name == "LIST" else (part[0] if part else None)
    known = {attribute.name: attribute for attribute in table.spec(op.name).attributes}
    for name, value in site.attributes:
        named[name] = element_dtype(value) if known[name].kind.name == "DTYPE" else value
    required = {a.name for a in function._schema.arguments if not a.has_default_value()}
    expected = function(**{**dict.fromkeys(required), **named})
    actual = table.build(op).function(*example.operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if table.spec(e.name).rule is not None], ids=lambda e: e.name)
def test_rules_agree_with_meta_tensors(example: Example) -> None:
    (op,) = (op for op in body_ops(example.module()) if not isinstance(op, Const))
    row, site = table.spec(op.name), table.site_of(op)
    assert row.rule is not None
    ruled = row.rule(site)
    # What draws random numbers must know its key, and a mask of so many elements their number.
    device = "cpu" if row.random or example.name == "cirh.MaskFromTopK" else "meta"
    operands = [torch.zeros(info(v).shape, dtype=info(v).dtype, device=device) for v in table.runtime_operands(op)]
    results = row.prepare(site).function(*operands)
    results = results if isinstance(results, (tuple, list)) else [results]
    made = table_aten.corrected_results(site, tuple(TensorInfo(tuple(r.shape), r.dtype) for r in results))
    assert ruled is None or ruled == made


def test_every_rule_decides_at_least_one_example() -> None:
    decided = {
        example.name
        for example in EXAMPLES
        for op in body_ops(example.module())
        if not isinstance(op, Const) and (rule := table.spec(op.name).rule) is not None and rule(table.site_of(op))
    }
    assert decided >= set(rules.ATEN) | {name for name, row in table_cirh.ROWS.items() if row.rule is not None}


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

"""Text: what the real client printed and what we print parse, verify and come back the same."""

import re
from pathlib import Path

import pytest
import torch
from module_examples import SAMPLES, mlp_step
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import SplatAttr
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.types import shape
from waferbox.cirh.modules.graph import canonical_text, extract, signature
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.table.lookup import site_of
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module


def assert_same(a: ModuleOp, b: ModuleOp) -> None:
    assert a.is_structurally_equivalent(b)
    assert all(x.location == y.location for x, y in zip(a.walk(), b.walk(), strict=True))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_samples_come_back_the_same(path: Path) -> None:
    module = parse_module(path.read_text())
    text = print_module(module)
    again = parse_module(text)
    assert_same(module, again)
    assert print_module(again) == text
    assert canonical_text(module) == canonical_text(again)
    module.verify()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_samples_verify(path: Path) -> None:
    verify(parse_module(path.read_text()))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_samples_are_printed_as_the_real_client_did(path: Path) -> None:
    """Line by line, but for the last digit of some float constants, where MLIR does not round to nearest."""
    number = re.compile(r"-?\d+\.\d+(?:[eE][+-]?\d+)?")
    for ours, theirs in zip(
        print_module(parse_module(path.read_text())).split("\n"), path.read_text().split("\n"), strict=False
    ):
        assert number.sub("#", ours) == number.sub("#", theirs)
        for a, b in zip(number.findall(ours), number.findall(theirs), strict=True):
            assert float(a) == pytest.approx(float(b), rel=2e-7)


def test_infinities_keep_their_bits() -> None:
    path = next(p for p in SAMPLES if p.stem == "dls")
    values = [
        op.value.value
        for op in body_ops(parse_module(path.read_text()))
        if isinstance(op, Const) and isinstance(op.value, SplatAttr)
    ]
    assert float("inf") in values


def test_signature_of_a_sample() -> None:
    path = next(p for p in SAMPLES if p.stem == "fcsgd")
    found = signature(parse_module(path.read_text()))
    assert [(s.name, s.argument, s.result) for s in found.states] == [
        ("state.model.l.weight", 0, 0),
        ("state.model.l.bias", 2, 1),
        ("state.model.m.weight", 3, 2),
        ("state.model.m.bias", 4, 3),
    ]
    assert [(i.name, i.argument) for i in found.inputs] == [("input_0", 1), ("input_1", 5)]
    assert [(o.name, o.result) for o in found.outputs] == [("output_l", 4)]


def test_sources_of_a_sample() -> None:
    path = next(p for p in SAMPLES if p.stem == "fcsgd")
    sources = [source_of(op) for op in body_ops(parse_module(path.read_text())) if op.name == "cirh.MatMul"]
    assert [(s.module, s.backward, s.op) for s in sources[:3]] == [
        ("l", False, "aten::addmm"),
        ("m", False, "aten::addmm"),
        ("m", True, "aten::mm"),
    ]
    assert str(sources[0]) == "ops.py:29 (in l)"
    assert "(in m, backward)" in str(sources[2])


def test_a_built_module_comes_back_the_same() -> None:
    module = mlp_step()
    verify(module)
    text = print_module(module)
    assert 'loc("fc1.fwd/aten::addmm"("train.py":53:0))' in text
    assert_same(module, parse_module(text))


def test_without_locations_there_are_none() -> None:
    assert "loc" not in print_module(mlp_step(), locations=False)


def test_canonical_text_sees_structure_only() -> None:
    """Other locations, other constants in the way and another order of their definitions make no difference."""
    module = mlp_step()
    constants = [op for op in body_ops(module) if isinstance(op, Const)]
    rest = [op for op in body_ops(module) if not isinstance(op, Const)]
    arguments, results = list(func_of(module).block.args), list(return_of(module).operands)
    plain = extract([*constants, *rest], arguments, results)
    reversed_ = extract([*constants[::-1], *rest], arguments, results, locations=True)
    assert canonical_text(plain) == canonical_text(reversed_)
    fewer = extract(rest, arguments, results[:-1])
    assert canonical_text(plain) != canonical_text(fewer)


def test_extract_gives_a_kernel() -> None:
    module = mlp_step()
    layer = [op for op in body_ops(module) if source_of(op).module == "fc1" and not source_of(op).backward]
    inputs = list(
        dict.fromkeys(
            v for op in layer for v in op.operands if not isinstance(v.owner, (Const, *{type(o) for o in layer}))
        )
    )
    kernel = extract(layer, inputs, [layer[-1].results[0]])
    verify(kernel)
    assert [shape(v) for v in return_of(kernel).operands] == [(16, 32)]
    assert not signature(kernel).states


def test_strings_with_quotes_and_newlines_come_back() -> None:
    module = mlp_step()
    text = print_module(module, locations=False).replace("state.model.fc1.weight", "a \\22b\\22 \\5C \\0A \\C3\\BC")
    again = parse_module(text)
    assert signature(again).states[0].name == 'a "b" \\ \n ü'
    assert_same(again, parse_module(print_module(again)))


def test_attributes_of_any_structure_come_back() -> None:
    attributes = '{internal = {empty = [], names = ["a", "b"], numbers = [1 : i64, {b = true, c}, [unit]]}}'
    line = f"%0 = cirh.Relu %a {attributes} : tensor<4xf32>"
    text = f"module {{ func @graph(%a: tensor<4xf32>) -> (tensor<4xf32>) {{ {line} return %0 : tensor<4xf32> }} }}"
    module = parse_module(text)
    printed = print_module(module)
    assert attributes in printed
    assert parse_module(printed).is_structurally_equivalent(module)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_dense_constants_come_back(dtype: torch.dtype) -> None:
    from waferbox.cirh.modules.builder import GraphBuilder

    builder = GraphBuilder()
    numbers = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)) * 50
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    tensors = [numbers.abs().to(dtype) if dtype is torch.uint8 else numbers.to(dtype), torch.arange(1000).to(dtype)]
    if dtype.is_floating_point:
        tensors.append(special.to(dtype))
    values = [builder.dense(tensor) for tensor in tensors]
    module = builder.finish([(value, None) for value in values])
    again = parse_module(print_module(module))
    assert_same(module, again)
    for op, tensor in zip(body_ops(again), tensors, strict=True):
        assert isinstance(op, Const)
        assert op.value.tensor().equal(tensor) or dtype.is_floating_point
        assert op.value.tensor().view(torch.uint8).equal(tensor.view(torch.uint8))


PACK = """module  {
  func @graph(%arg0: tensor<2x6xf32>) -> (tensor<2x2xf32>) {
    %0:3 = cirh.Split %arg0 {axis = 1 : i64, split_sizes = dense<2> : tensor<3xi64>} : (tensor<2x6xf32>) -> \
(tensor<2x2xf32>, tensor<2x2xf32>, tensor<2x2xf32>)
    %1 = cirh.Add %0#2, %0#0 : tensor<2x2xf32>
    return %1 : tensor<2x2xf32>
  }
}
"""


def test_a_pack_of_results_comes_back_as_it_was() -> None:
    module = parse_module(PACK)
    verify(module)
    split, add = body_ops(module)
    assert list(add.operands) == [split.results[2], split.results[0]]
    assert print_module(module, locations=False) == PACK


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%0:3", "%0:2"),
        ("%0:3", "%0:0"),
        ("%0:3", "%0:999999999999"),
        ("%0:3", "%0#3"),
        ("%0:3", "%0:3, %0:3"),
        ("%0#2", "%0#3"),
        ("%0#2", "%0:2"),
        ("%0#2", "%0"),
    ],
)
def test_a_pack_that_is_not_one_is_refused(old: str, new: str) -> None:
    with pytest.raises(CirhError, match="line "):
        parse_module(PACK.replace(old, new, 1))


SEGMENTS = """module  {
  func @graph(%arg0: tensor<2x6xf32>, %arg1: tensor<3x6xf32>) -> (tensor<2x3xf32>) {
    %0 = cirh.DotGeneral %arg0, %arg1 {lhs_contracting_dimensions = dense<1> : tensor<1xi64>, \
operand_segment_sizes = dense<[1, 1, 0, 0, 0, 0, 0]> : vector<7xi32>, \
rhs_contracting_dimensions = dense<1> : tensor<1xi64>, lhs_batching_dimensions = dense<> : tensor<0xi64>, \
rhs_batching_dimensions = dense<> : tensor<0xi64>} : (tensor<2x6xf32>, tensor<3x6xf32>) -> tensor<2x3xf32>
    return %0 : tensor<2x3xf32>
  }
}
"""


def test_counts_of_operands_may_be_a_vector_and_name_more_than_there_can_be() -> None:
    module = parse_module(SEGMENTS)
    verify(module)
    (product,) = body_ops(module)
    assert site_of(product).segments == (1, 1)
    verify(parse_module(print_module(module)))


@pytest.mark.parametrize("counts", ["1, 1, 1, 0, 0, 0, 0", "1, 0, 1, 0, 0, 0, 0", "2, 0, 0, 0, 0, 0, 0", "1"])
def test_operands_elsewhere_than_where_they_can_be_are_refused(counts: str) -> None:
    with pytest.raises(CirhError, match="takes lhs, rhs; 2 operands are given"):
        verify(parse_module(SEGMENTS.replace("1, 1, 0, 0, 0, 0, 0", counts)))


def test_a_value_is_no_vector() -> None:
    with pytest.raises(CirhError, match="expected a tensor type at 'vector<2x6xf32>'"):
        parse_module(SEGMENTS.replace("%arg0: tensor<2x6xf32>", "%arg0: vector<2x6xf32>"))


def test_attributes_that_are_alike_are_read_alike() -> None:
    """The same text, with a comment or a string in which it ends otherwise, and attributes that a pass changes."""
    text = """
    module {
      func @graph(%x: tensor<4x4xf32>) -> (tensor<4x4xf32>) {
        %0 = cirh.Const dense<2.0> : tensor<f32>
        %1 = cirh.Const dense<2.0> : tensor<f32>
        %2 = cirh.Const dense<2.0> : tensor<1xf32>
        %3 = aten.cumsum %x {dim = 0 : i64} : (tensor<4x4xf32>) -> tensor<4x4xf32>
        %4 = aten.cumsum %3 {dim = 0 : i64} : (tensor<4x4xf32>) -> tensor<4x4xf32>
        %5 = aten.cumsum %4 {dim = 0 : i64 // } : (tensor<4x4xf32>) -> tensor<4x4xf32>
        } : (tensor<4x4xf32>) -> tensor<4x4xf32>
        %6 = aten.cumsum %5 {dim = 1 : i64} : (tensor<4x4xf32>) -> tensor<4x4xf32>
        return %6 : tensor<4x4xf32>
      }
    }
    """
    module = parse_module(text)
    constants = [op.value for op in body_ops(module) if isinstance(op, Const)]
    assert constants[0] == constants[1] != constants[2]
    sums = [op for op in body_ops(module) if op.name == "aten.cumsum"]
    assert [site_of(op).attributes for op in sums] == [(("dim", dim),) for dim in (0, 0, 0, 1)]
    sums[0].attributes["dim"] = sums[3].attributes["dim"]
    assert [site_of(op).attributes for op in sums] == [(("dim", dim),) for dim in (1, 0, 0, 1)]
    verify(module)


@pytest.mark.parametrize("second", ["{dim = 0 : i65}", "{dim = 0 : i64, dim = 0 : i64}", "{dim = 0 : i64", "{dim 0}"])
def test_attributes_that_are_nearly_alike_are_refused(second: str) -> None:
    types = "(tensor<4x4xf32>) -> tensor<4x4xf32>"
    texts = enumerate(["{dim = 0 : i64}", second])
    operations = "\n".join(f"%{number} = aten.cumsum %x {text} : {types}" for number, text in texts)
    function = "func @graph(%x: tensor<4x4xf32>) -> (tensor<4x4xf32>)"
    text = f"module {{\n{function} {{\n{operations}\nreturn %1 : tensor<4x4xf32>\n}}\n}}"
    with pytest.raises(CirhError, match="line 4"):
        parse_module(text)

"""Random graphs: built, printed, parsed, verified, taken apart and run, they stay the same."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_examples import F32, mlp_step
from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.ir import SSAValue

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import shape, tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.graph import canonical_text, extract
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module


@st.composite
def modules(draw: st.DrawFn) -> ModuleOp:
    """A random module of matrices: products, sums, reductions, views, comparisons and constants."""
    builder = GraphBuilder()
    sizes = st.sampled_from([1, 2, 3])
    values: list[SSAValue] = []
    for number in range(draw(st.integers(1, 3))):
        type = tensor_type((draw(sizes), draw(sizes)), F32)
        values.append(builder.argument(type, state=f"s{number}" if draw(st.booleans()) else None))
    for number in range(draw(st.integers(1, 12))):
        loc = Source(
            module=f"m{draw(st.integers(0, 2))}", backward=draw(st.booleans()), op="aten::x", file="t.py", line=number
        )
        x = draw(st.sampled_from(values))
        rows, columns = shape(x)
        kind = draw(
            st.sampled_from(["unary", "binary", "matmul", "transpose", "reduce", "reshape", "concat", "select", "cast"])
        )
        if kind == "unary":
            made = builder.op(draw(st.sampled_from(["cirh.Tanh", "cirh.Relu", "aten.silu", "cirh.Neg"])), [x], loc=loc)
        elif kind == "binary":
            other = builder.splat(draw(st.floats(-2, 2, width=32)), (rows, columns), F32)
            made = builder.op(draw(st.sampled_from(["cirh.Add", "cirh.Mul"])), [x, other], loc=loc)
        elif kind == "matmul":
            made = builder.op("cirh.MatMul", [x, x], {"transpose_a": True, "transpose_b": False}, loc)
        elif kind == "transpose":
            made = builder.op("cirh.Transpose", [x, builder.dense(torch.tensor([1, 0]))], loc=loc)
        elif kind == "reduce":
            dimensions = draw(st.sampled_from([[0], [1], [0, 1]]))
            attributes: dict[str, AttrValue] = {
                "dimensions": dimensions,
                "keep_dims": dimensions,
                "reduce_kind": draw(st.sampled_from(["ADD", "MAX"])),
            }
            made = builder.op("cirh.Reduce", [x], attributes, loc)
        elif kind == "reshape":
            made = builder.op("cirh.Reshape", [x], loc=loc, types=[tensor_type((columns, rows), F32)])
        elif kind == "concat":
            made = builder.op("cirh.Concat", [x, x], {"axis": draw(st.integers(0, 1))}, loc)
        elif kind == "select":
            (flags,) = builder.op("cirh.Compare", [x, x], {"comparison_direction": "GE"}, loc)
            made = builder.op("cirh.Select", [flags, x, builder.splat(0.0, (rows, columns), F32)], loc=loc)
        else:
            (half,) = builder.op(
                "cirh.Cast", [x], {"Truncate": False}, loc, types=[tensor_type((rows, columns), torch.float16)]
            )
            made = builder.op("cirh.Cast", [half], {"Truncate": False}, loc, types=[tensor_type((rows, columns), F32)])
        values += made
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return builder.finish([(value, f"output_{i}") for i, value in enumerate(outputs)])


def _run(module: ModuleOp) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return Kernel.build(module)([torch.rand(shape(a), generator=generator) for a in func_of(module).block.args])


@settings(max_examples=60)
@given(modules())
def test_text_and_back(module: ModuleOp) -> None:
    verify(module)
    text = print_module(module)
    again = parse_module(text)
    verify(again)
    assert again.is_structurally_equivalent(module)
    assert [op.location for op in again.walk()] == [op.location for op in module.walk()]
    assert print_module(again) == text
    canonical = canonical_text(module)
    assert canonical_text(again) == canonical_text(parse_module(canonical)) == canonical
    for a, b in zip(_run(module), _run(again), strict=True):
        assert a.view(torch.int32).equal(b.view(torch.int32))


@settings(max_examples=40)
@given(modules(), st.data())
def test_two_halves_make_the_whole(module: ModuleOp, data: st.DataObject) -> None:
    """A module cut in two kernels, with every value between them handed over, gives the same bits."""
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    cut = data.draw(st.integers(0, len(ops)))
    arguments = list(func_of(module).block.args)
    made = [value for op in ops[:cut] for value in op.results]
    first = extract(ops[:cut], arguments, made)
    second = extract(ops[cut:], [*arguments, *made], list(return_of(module).operands))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape(a), generator=generator) for a in arguments]
    whole = Kernel.build(module)(inputs)
    halves = Kernel.build(second)([*inputs, *Kernel.build(print_module(first))(inputs)])
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _damaged(damage: str) -> ModuleOp:
    module = mlp_step()
    ops = body_ops(module)
    relu = next(op for op in ops if op.name == "cirh.Relu")
    if damage == "operand of another type":
        relu.operands = [ops[-1].results[0]]
    elif damage == "use before definition":
        relu.operands = [next(op for op in ops if op.name == "cirh.ReluGrad").operands[0]]
    elif damage == "attribute lost":
        del next(op for op in ops if op.name == "cirh.Reduce").attributes["dimensions"]
    elif damage == "attribute too many":
        relu.attributes["alpha"] = next(iter(next(op for op in ops if op.name == "cirh.Reduce").attributes.values()))
    elif damage == "two results for a state":
        function = func_of(module)
        given = function.attributes["arg_attrs"]
        assert isinstance(given, ArrayAttr)
        attributes = list(given.data)
        attributes[3] = attributes[2]
        function.attributes["arg_attrs"] = ArrayAttr(attributes)
    return module


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("operand of another type", "cirh.Relu"),
        ("use before definition", "before it is defined"),
        ("attribute lost", "'dimensions' is missing"),
        ("attribute too many", "no attribute 'alpha'"),
        ("two results for a state", "is there twice"),
    ],
)
def test_damaged_modules_do_not_verify(damage: str, message: str) -> None:
    with pytest.raises(CirhError, match=message):
        verify(_damaged(damage))


def test_two_thousand_operations_take_less_than_a_second_each() -> None:
    builder = GraphBuilder()
    value = builder.argument(tensor_type((64, 64), F32), state="s")
    for number in range(700):
        loc = Source(module=f"layers.{number // 20}", op="aten::mm", file="train.py", line=number % 50)
        (product,) = builder.op("cirh.MatMul", [value, value], {"transpose_a": False, "transpose_b": True}, loc)
        (scaled,) = builder.op("cirh.Mul", [product, builder.splat(number / 7, (64, 64), F32)], loc=loc)
        (value,) = builder.op("cirh.Tanh", [scaled], loc=loc)
    module = builder.finish([(value, None)], {0: 0})
    text = print_module(module)
    for work in (
        lambda: print_module(module),
        lambda: parse_module(text),
        lambda: verify(module),
        lambda: canonical_text(module),
    ):
        start = time.process_time()
        work()
        assert time.process_time() - start < 1

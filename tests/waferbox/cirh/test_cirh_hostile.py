"""Hostile text: refused with a CirhError, in bounded time and memory."""

import contextlib
import resource
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from module_examples import mlp_step

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

BODY = "module {{ func @graph(%a: tensor<4xf32>) -> (tensor<4xf32>) {{ {} return %a : tensor<4xf32> }} }}"


def with_op(line: str) -> str:
    return BODY.format(line)


def verified(text: str) -> None:
    module = parse_module(text)
    for op in body_ops(module):
        attrs(op)
    verify(module)


HOSTILE: dict[str, Callable[[], str]] = {
    "empty": lambda: "",
    "other text": lambda: "import os",
    "nothing but braces": lambda: "module {" * 100_000,
    "nested lists": lambda: with_op(f"%0 = cirh.Const dense<{'[' * 100_000}1{']' * 100_000}> : tensor<1xf32>") + "x",
    "nested dictionaries": lambda: with_op("%0 = cirh.Relu %a " + "{a = " * 30_000 + "1" + "}" * 30_000),
    "nested arrays": lambda: with_op("%0 = cirh.Relu %a {a = " + "[" * 30_000 + "]" * 30_000 + "} : tensor<4xf32>"),
    "an array without an end": lambda: with_op("%0 = cirh.Relu %a {a = [1, 2} : tensor<4xf32>"),
    "nested callsites": lambda: "#loc1 = loc(" + 'callsite("a" at ' * 20_000,
    "named locations": lambda: "#loc1 = loc(" + '"a"(' * 20_000,
    "rank": lambda: BODY.replace("tensor<4xf32>", f"tensor<{'1x' * 100_000}f32>").format(""),
    "huge dimension": lambda: BODY.replace("tensor<4xf32>", f"tensor<{10**15 - 1}xf32>").format(""),
    "product of dimensions": lambda: BODY.replace("tensor<4xf32>", f"tensor<{'100000x' * 4}f32>").format(""),
    "digits": lambda: with_op(f"%0 = cirh.Const dense<{'9' * 100_000}> : tensor<4xi64>"),
    "exponent": lambda: with_op("%0 = cirh.Const dense<1e999999999> : tensor<4xi64>"),
    "huge integer attribute": lambda: with_op(f"%0 = cirh.Relu %a {{axis = {10**30} : i64}} : tensor<4xf32>"),
    "too many bits": lambda: with_op("%0 = cirh.Const dense<0xFFFFFFFFFF> : tensor<4xf32>"),
    "integer out of range": lambda: with_op("%0 = cirh.Const dense<300> : tensor<4xi8>"),
    "float in integers": lambda: with_op("%0 = cirh.Const dense<1.5> : tensor<4xi64>"),
    "wrong element count": lambda: with_op("%0 = cirh.Const dense<[1.0, 2.0]> : tensor<4xf32>"),
    "wrong byte count": lambda: with_op('%0 = cirh.Const dense<"0x0102"> : tensor<4xf32>'),
    "not hexadecimal": lambda: with_op('%0 = cirh.Const dense<"0xZZ"> : tensor<4xf32>'),
    "truth values of two": lambda: with_op('%0 = cirh.Const dense<"0x02000101"> : tensor<4xi1>'),
    "unknown element type": lambda: BODY.replace("f32", "i99999999").format(""),
    "unknown operation": lambda: with_op("%0 = os.system %a : tensor<4xf32>"),
    "unknown aten operation": lambda: with_op(
        "%0 = aten.add_ %a, %a : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>"
    ),
    "private attribute": lambda: with_op("%0 = aten.__class__ %a : tensor<4xf32>"),
    "long identifier": lambda: with_op(f"%0 = {'a' * 5_000_000} %a : tensor<4xf32>"),
    "long string": lambda: with_op(f'%0 = cirh.Gelu %a {{approximation = "{"a" * 5_000_000}"}} : tensor<4xf32>'),
    "open string": lambda: with_op('%0 = cirh.Gelu %a {approximation = "' + '\\"' * 16_000_000),
    "unknown escape": lambda: BODY.format("").replace("%a: tensor<4xf32>", '%a: tensor<4xf32> {x = "\\'),
    "forward reference": lambda: with_op("%0 = cirh.Relu %1 : tensor<4xf32> %1 = cirh.Relu %a : tensor<4xf32>"),
    "defined twice": lambda: with_op("%a = cirh.Relu %a : tensor<4xf32>"),
    "lying operand type": lambda: with_op("%0 = cirh.Relu %a : tensor<5xf32>"),
    "lying result shape": lambda: with_op(
        '%0 = cirh.Compare %a, %a {comparison_direction = "GT"} : tensor<4xf32> -> tensor<5xi1>'
    ),
    "lying result type": lambda: with_op("%0 = aten.isnan %a : (tensor<4xf32>) -> tensor<4xf32>"),
    "wrong number of results": lambda: with_op("%0, %1 = cirh.Relu %a : tensor<4xf32>"),
    "two results said, one made": lambda: with_op(
        "%0, %1 = cirh.Relu %a : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)"
    ),
    "no return": lambda: "module { func @graph() -> () { } }",
    "wrong return type": lambda: (
        "module { func @graph(%a: tensor<4xf32>) -> (tensor<5xf32>) { return %a : tensor<4xf32> } }"
    ),
    "text after the module": lambda: BODY.format("") + "module {}",
    "unknown location": lambda: with_op("%0 = cirh.Relu %a : tensor<4xf32> loc(#loc9)"),
    "repeated attribute": lambda: with_op("%0 = cirh.Softmax %a {axis = 0 : i64, axis = 1 : i64} : tensor<4xf32>"),
    "attribute of another kind": lambda: with_op('%0 = cirh.Softmax %a {axis = "x"} : tensor<4xf32>'),
    "type as attribute": lambda: with_op("%0 = cirh.Softmax %a {axis = tensor<4xf32>} : tensor<4xf32>"),
    "huge list from a splat": lambda: with_op(
        '%0 = cirh.Reduce %a {dimensions = dense<0> : tensor<100000000000xi64>, reduce_kind = "ADD"}'
        " : (tensor<4xf32>) -> tensor<f32>"
    ),
    "list with two dimensions": lambda: with_op(
        '%0 = cirh.Reduce %a {dimensions = dense<0> : tensor<1x1xi64>, reduce_kind = "ADD"}'
        " : (tensor<4xf32>) -> tensor<f32>"
    ),
    "arange without end": lambda: with_op(
        "%b = cirh.Const dense<0> : tensor<i64> %e = cirh.Const dense<1000000000000> : tensor<i64>"
        " %s = cirh.Const dense<1> : tensor<i64>"
        " %0 = cirh.Arange %b, %e, %s : (tensor<i64>, tensor<i64>, tensor<i64>) -> tensor<1000000000000xi64>"
    ),
    "aten arange without end": lambda: with_op(
        "%0 = aten.arange.start_step {start = 0 : i64, end = 9000000000000000000 : i64, step = 1 : i64}"
        " : () -> tensor<4xi64>"
    ),
    "result too large": lambda: with_op(
        "%0 = aten.repeat %a {repeats = dense<[99999999, 99999999, 9999999]> : tensor<3xi64>}"
        " : (tensor<4xf32>) -> tensor<4xf32>"
    ),
    "split in many": lambda: with_op(
        "%0 = aten.split.Tensor %a {split_size = 0 : i64, dim = 0 : i64} : (tensor<4xf32>) -> tensor<4xf32>"
    ),
    "permutation by an enormous splat": lambda: with_op(
        "%p = cirh.Const dense<0> : tensor<100000000000xi64>"
        " %0 = cirh.Transpose %a, %p : (tensor<4xf32>, tensor<100000000000xi64>) -> tensor<4xf32>"
    ),
    "reserved function attribute": lambda: BODY.replace(
        "-> (tensor<4xf32>)", '-> (tensor<4xf32>) attributes {{sym_name = "x"}}'
    ).format(""),
    "alias of no result": lambda: BODY.replace(
        "%a: tensor<4xf32>", '%a: tensor<4xf32> {{tf.aliasing_output = 7 : i64, tf.resource_name = "s"}}'
    ).format(""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused(name: str) -> None:
    text = HOSTILE[name]()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(CirhError) as raised:
        verified(text)
    assert time.process_time() - start < 5
    # Kilobytes more than before, the text and its tokens apart.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000
    assert len(str(raised.value)) < 1000


def test_enormous_splats_cost_nothing() -> None:
    start = time.process_time()
    text = with_op("%0 = cirh.Const dense<1.5> : tensor<1000000x1000000xf32>")
    module = parse_module(text)
    verify(module)
    assert "dense<1.500000e+00> : tensor<1000000x1000000xf32>" in print_module(module)
    assert time.process_time() - start < 1


def test_long_dense_constants_are_quick_or_refused() -> None:
    start = time.process_time()
    with pytest.raises(CirhError):
        parse_module(with_op(f"%0 = cirh.Const dense<[{'1.0, ' * 2_000_000}1.0]> : tensor<2000001xf32>"))
    assert time.process_time() - start < 4
    start = time.process_time()
    parse_module(with_op(f'%0 = cirh.Const dense<"0x{"0102" * 2_000_000}"> : tensor<1000000xf32>'))
    assert time.process_time() - start < 2


TEXT = print_module(mlp_step())


@settings(max_examples=150)
@given(st.data())
def test_damaged_text_is_refused_or_still_a_module(data: st.DataObject) -> None:
    """Whatever is cut out, doubled or replaced: a CirhError or a module that verifies, never another error."""
    start = data.draw(st.integers(0, len(TEXT) - 1))
    end = data.draw(st.integers(start, min(len(TEXT), start + 40)))
    piece = data.draw(
        st.one_of(
            st.text(max_size=8),
            st.sampled_from(
                ["0", "99", "-1", "f16", "i1", "%0", "%cst", "[", "]", "<", ">", "{", "}", '"', "dense<", "true", "x"]
            ),
            st.just(TEXT[start:end] * 2),
        )
    )
    with contextlib.suppress(CirhError):
        verified(TEXT[:start] + piece + TEXT[end:])

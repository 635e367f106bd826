"""Each operation that can be executed, by its examples: types, memory, calls, text, and numbers that lie.

One test for each example holds them all: as tests of their own they would cost more than what they check.
"""

import contextlib
import random
import re
import time
from collections.abc import Sequence

import pytest
import torch
from cirh_examples import Example, examples
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.elements import element_dtype
from waferbox.cirh.dialect.operations import Const, body_ops, return_of
from waferbox.cirh.dialect.types import TensorInfo, info
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.table import aten as table_aten
from waferbox.cirh.table import lookup as table
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

NUMBER = re.compile(r"(?<![\w.%])-?\d+(?![\w.]*e)|(?<=[<x])\d+(?=x)")
LIES = ["0", "-1", "1", "7", str(2**31), str(2**62), str(-(2**62)), str(2**63 - 1), "1000003"]


@pytest.mark.parametrize("example", list(examples()), ids=lambda e: e.name)
def test_an_operation(example: Example) -> None:
    module = example.module()
    kernel = Kernel.build(module)
    before = [tensor.clone() for tensor in example.inputs()]
    results = kernel(example.inputs())
    for tensor, copy in zip(example.inputs(), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
    declared = [info(value) for value in return_of(module).operands]
    assert [(tuple(r.shape), r.dtype) for r in results] == [tuple(type) for type in declared]
    # In a narrow element type, kernels for other strides round elsewhere.
    if all(operand.dtype is not torch.bfloat16 for operand in example.operands):
        check_memory_makes_no_difference(example, kernel, results)
    if example.name.startswith("aten."):
        check_the_call_is_that_of_the_overload(example, module)
    check_a_rule_agrees_with_meta_tensors(example, module)
    check_text_comes_back_the_same(module)
    check_numbers_may_lie(example, module)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the last dimension first in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def check_memory_makes_no_difference(example: Example, kernel: Kernel, expected: Sequence[torch.Tensor]) -> None:
    """Results do not depend on how operands lie in memory."""
    for change in (turned, with_gaps):
        results = kernel([change(tensor) for tensor in example.inputs()])
        torch.testing.assert_close(results, expected, equal_nan=True)


def check_the_call_is_that_of_the_overload(example: Example, module: ModuleOp) -> None:
    """The prepared call, which may be a builtin function, gives the bits of the overload called by name."""
    (op,) = (op for op in body_ops(module) if not isinstance(op, Const))
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
        if known[name].kind.name == "DTYPE":
            assert isinstance(value, str)
            named[name] = element_dtype(value)
        else:
            named[name] = value
    required = {a.name for a in function._schema.arguments if not a.has_default_value()}
    expected = function(**{**dict.fromkeys(required), **named})
    actual = table.build(op).function(*example.operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_a_rule_agrees_with_meta_tensors(example: Example, module: ModuleOp) -> None:
    (op,) = (op for op in body_ops(module) if not isinstance(op, Const))
    row, site = table.spec(op.name), table.site_of(op)
    if row.rule is None:
        return
    ruled = row.rule(site)
    # What draws random numbers must know its key, and a mask of so many elements their number.
    device = "cpu" if row.random or example.name == "cirh.MaskFromTopK" else "meta"
    operands = [torch.zeros(info(v).shape, dtype=info(v).dtype, device=device) for v in table.runtime_operands(op)]
    results = row.prepare(site).function(*operands)
    results = results if isinstance(results, (tuple, list)) else [results]
    made = table_aten.corrected_results(site, tuple(TensorInfo(tuple(r.shape), r.dtype) for r in results))
    assert ruled is None or ruled == made


def check_text_comes_back_the_same(module: ModuleOp) -> None:
    again = parse_module(print_module(module))
    assert module.is_structurally_equivalent(again)
    verify(again)
    assert [attrs(op) for op in body_ops(module)] == [attrs(op) for op in body_ops(again)]


def check_numbers_may_lie(example: Example, module: ModuleOp) -> None:
    """Sizes, dimensions, strides: some replaced by others make a module that is refused, or another that verifies."""
    text = print_module(module, locations=False)
    places = [match.span() for match in NUMBER.finditer(text)]
    if not places:
        return
    chance = random.Random(example.name)
    start = time.perf_counter()
    for _ in range(12):
        first, last = chance.choice(places)
        with contextlib.suppress(CirhError):
            lying = parse_module(text[:first] + chance.choice(LIES) + text[last:])
            for op in body_ops(lying):
                attrs(op)
            verify(lying)
    assert time.perf_counter() - start < 10

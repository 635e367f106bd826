"""What the verifier lets pass runs, whatever types its operands have."""

import dataclasses
import itertools

import pytest
import torch
from cirh_examples import Example, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.operations import return_of
from waferbox.cirh.dialect.types import TensorInfo, info
from waferbox.cirh.execution.kernel import Kernel, OperationFailed
from waferbox.cirh.table import lookup as table

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXAMPLES = [example for example in examples() if example.operands]
# Products, convolutions and norms: where a step mixes halves with weights in float32.
_MIXED = ("atMul", "DotGeneral", "mm", "mv", "aten.dot", "convolution", "norm", "Norm", "Attention")
MIXED = [example for example in EXAMPLES if any(name in example.name for name in _MIXED)]


def types_of(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The types that an operand may be changed to."""
    return FLOATS if tensor.is_floating_point() else (tensor.dtype,)


def check(example: Example, dtypes: tuple[torch.dtype, ...]) -> None:
    """The operation on operands of these types is refused, or it runs and makes what was said that it makes."""
    operands = [tensor.to(dtype) for tensor, dtype in zip(example.operands, dtypes, strict=True)]
    retyped = dataclasses.replace(example, operands=operands)
    try:
        module = retyped.module()
    except CirhError:
        return
    try:
        made = Kernel.build(module)(retyped.inputs())
    except (NotImplementedError, OperationFailed) as error:  # of a type that torch's kernel does not have at all
        if "not implemented for" not in str(error):
            raise
        return
    said = [info(value) for value in return_of(module).operands]
    assert [TensorInfo(tuple(value.shape), value.dtype) for value in made] == said


@pytest.mark.parametrize("example", MIXED, ids=lambda example: example.name)
def test_products_convolutions_and_norms_of_mixed_types_are_refused_or_run(example: Example) -> None:
    """Of three types, in every combination: with more operands of one kind, those at the end go together."""
    varied = [types_of(tensor)[:3] for tensor in example.operands[:4]]
    for first in itertools.product(*varied):
        rest = [first[-1] if tensor.is_floating_point() else tensor.dtype for tensor in example.operands[4:]]
        check(example, (*first, *rest))


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_operations_on_floats_of_any_types_are_refused_or_run(data: st.DataObject) -> None:
    example = data.draw(st.sampled_from(EXAMPLES))
    check(example, tuple(data.draw(st.sampled_from(types_of(tensor))) for tensor in example.operands))


def test_the_examples_have_all_products_convolutions_and_norms() -> None:
    names = {example.name for example in MIXED}
    assert {"cirh.MatMul", "aten.addmm", "aten.baddbmm", "aten.convolution", "aten.convolution_backward"} <= names
    assert {"aten.native_layer_norm", "aten.native_layer_norm_backward", "cirh.AttentionGrad"} <= names
    norms = {name for name in table.names() if "norm" in name.lower()}
    assert norms <= names

"""Operations that only the vendor's client writes: their numbers are those of plain torch, and the rest is refused."""

from typing import Any

import pytest
import torch
from cirh_examples import Example
from vendor_examples import VendorExample, vendor_examples
from xdsl.dialects.builtin import DictionaryAttr
from xdsl.ir import Block

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue, attribute
from waferbox.cirh.dialect.operations import Return, make_module, operation_class
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.table import lookup as table
from waferbox.cirh.text.parser import parse_module

F32 = torch.float32


@pytest.mark.parametrize("case", list(vendor_examples()), ids=lambda case: case.name)
def test_numbers_are_those_of_plain_torch(case: VendorExample) -> None:
    example = Example(f"cirh.{case.name}", case.operands, case.attributes, None, case.constants, case.types, case.read)
    made = Kernel.build(example.module())(example.inputs())
    expected = case.expected(*example.inputs())
    torch.testing.assert_close(made, [expected] if isinstance(expected, torch.Tensor) else list(expected))


@pytest.mark.parametrize("name", sorted(table.REFUSED))
def test_other_operations_are_refused_by_name_and_line(name: str) -> None:
    text = f"""module {{
      func @graph(%a: tensor<4xf32>) -> (tensor<4xf32>) {{
        %0 = {name} %a {{scale = 1.0 : f32}} : tensor<4xf32> loc(#loc1)
        return %0 : tensor<4xf32>
      }}
    }}
    #loc1 = loc("layer.fwd/aten::x"("train.py":53:0))
    """
    with pytest.raises(CirhError, match=rf"train.py:53 \(in layer\): {name} is an operation of the vendor's"):
        verify(parse_module(text))


CONVOLUTION = {
    "conv_pass_direction": "FWD",
    "data_format": "NCHW",
    "dilation": [1, 1],
    "groups": 1,
    "padding": [0, 0],
    "stride": [1, 1],
}
POOL = {
    "data_format": "NCHW",
    "dilation": [1] * 4,
    "ksize": [1, 1, 2, 2],
    "padding": [0] * 8,
    "pool_type": "MAX",
    "strides": [1, 1, 2, 2],
}
NORM: dict[str, AttrValue] = {"data_format": "NCHW", "epsilon": 1e-5, "is_training": True}
GROUPS = {"data_format": "NCHW", "num_groups": 1}
IMAGE, KERNEL = (2, 3, 4, 4), (5, 3, 3, 3)
Shapes = list[tuple[int, ...]]


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "results", "message"),
    [
        ("Convolution", [IMAGE, KERNEL], CONVOLUTION, [(2, 5, 3, 3)], "not"),
        (
            "Convolution",
            [IMAGE, KERNEL],
            {**CONVOLUTION, "data_format": "NHWC"},
            [(2, 5, 2, 2)],
            "x.movedim",
        ),
        ("Convolution", [IMAGE, KERNEL], {**CONVOLUTION, "groups": 3}, [(2, 5, 2, 2)], "in 3 groups"),
        ("Convolution", [IMAGE, KERNEL], {**CONVOLUTION, "stride": [0, 1]}, [(2, 5, 2, 2)], "stride"),
        ("Convolution", [IMAGE, KERNEL], {**CONVOLUTION, "padding": [0] * 4}, [(2, 5, 2, 2)], "padding"),
        ("Convolution", [IMAGE, KERNEL], {**CONVOLUTION, "transposed": True}, [(2, 5, 2, 2)], "does not fit"),
        ("Convolution", [IMAGE, KERNEL], {**CONVOLUTION, "conv_pass_direction": "BWD"}, [(2, 5, 2, 2)], "none of"),
        ("Pool", [IMAGE, IMAGE], POOL, [(2, 3, 3, 3)], r"make \[2, 2\] of \[4, 4\]; .* says \[3, 3\]"),
        ("Pool", [IMAGE, IMAGE], {**POOL, "strides": [1, 1, 0, 0]}, [(2, 3, 8, 8)], "adaptive pooling to more places"),
        ("Pool", [IMAGE, IMAGE], {**POOL, "ksize": [1, 2, 2, 2]}, [(2, 2, 2, 2)], "over samples or channels"),
        ("Pool", [IMAGE, IMAGE], {**POOL, "padding": [0] * 7 + [1]}, [(2, 3, 2, 2)], "on both sides"),
        ("Pool", [IMAGE, IMAGE], {**POOL, "pool_type": "L2"}, [(2, 3, 2, 2)], "pool_type L2"),
        (
            "Pool",
            [IMAGE, IMAGE],
            {**POOL, "pool_type": "AVERAGE", "padding": [0, 0, 0, 0, 1, 1, 1, 1]},
            [(2, 3, 3, 3)],
            "count_include_pad.*F.pad",
        ),
        ("FusedBatchNorm", [IMAGE, (3,), (3,), (3,), (2,)], NORM, [IMAGE, (3,), (3,)], "channels"),
        ("FusedBatchNormGrad", [IMAGE, IMAGE, (3,)], {"is_training": True}, [IMAGE, (3,), (3,)], "is missing"),
        ("GroupNorm", [IMAGE, (3,)], {**NORM, "num_groups": 3}, [IMAGE], "no attribute 'is_training'"),
        ("GroupNorm", [IMAGE, (1, 4), (3,)], {**GROUPS, "epsilon": 1e-5}, [IMAGE], "weights"),
        ("GroupNorm", [IMAGE, (3,), (3,)], GROUPS, [IMAGE], "'epsilon' is missing"),
        ("GroupNormGrad", [IMAGE, IMAGE, (4,)], GROUPS, [IMAGE, (4,), (4,)], "weights"),
        ("BiasAdd", [IMAGE, (4,)], {"dim": 1}, [IMAGE], "does not fit dimension 1"),
        ("BiasAddGrad", [IMAGE], {"dim": 1}, [(4,)], "is not"),
        ("MeshAllSlice", [IMAGE], {"split_axes": [0], "names": ""}, [KERNEL], "makes"),
        (
            "MeshShard",
            [IMAGE],
            {"mesh_id": 0, "split_axes": [0], "names": "", "partial_axes": [1]},
            [IMAGE],
            "partial tensors",
        ),
    ],
)
def test_what_has_no_certain_meaning_is_refused(
    name: str, shapes: Shapes, attributes: dict[str, Any], results: Shapes, message: str
) -> None:
    block = Block(arg_types=[tensor_type(shape, F32) for shape in shapes])
    op = operation_class(f"cirh.{name}").create(
        operands=list(block.args),
        result_types=[tensor_type(shape, F32) for shape in results],
        attributes={key: attribute(value) for key, value in attributes.items()},
    )
    block.add_ops([op, Return.create()])
    module = make_module(block, [DictionaryAttr({}) for _ in shapes], [])
    with pytest.raises(CirhError, match=message):
        verify(module)


def test_the_statistics_of_a_batch_norm_are_not_shown() -> None:
    """What the vendor's result is, a mean of the batch or one that moves, its texts do not say."""
    builder = GraphBuilder()
    types = [tensor_type(shape, F32) for shape in (IMAGE, (3,), (3,), (3,), (3,))]
    results = builder.op("cirh.FusedBatchNorm", [*map(builder.argument, types)], NORM, types=types[:3])
    with pytest.raises(CirhError, match="its result batch_mean is read"):
        verify(builder.finish([(results[0], None), (results[1], None)]))

"""The gradient of an embedding, made in a place that is given: the bits that torch gives."""

import pytest
import torch

from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder

ROWS, WIDTH = 50, 7


def kernel(dtype: torch.dtype, padding: int) -> Kernel:
    builder = GraphBuilder()
    gradient = builder.argument(tensor_type((6, 20, WIDTH), dtype))
    indices = builder.argument(tensor_type((6, 20), torch.int64))
    attributes = {"num_weights": ROWS, "padding_idx": padding, "scale_grad_by_freq": False}
    result = builder.op("aten.embedding_dense_backward", [gradient, indices], attributes)[0]
    return Kernel(builder.finish([(result, None)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [-1, 3])
def test_it_is_what_torch_gives(dtype: torch.dtype, padding: int) -> None:
    made = kernel(dtype, padding)
    assert made.direct_results == ({0} if padding < 0 and dtype in (torch.float32, torch.float64) else set())
    generator = torch.Generator().manual_seed(0)
    place = torch.full((ROWS, WIDTH), 7, dtype=dtype)
    for _ in range(3):
        gradient = torch.randn(6, 20, WIDTH, generator=generator).to(dtype)
        indices = torch.randint(ROWS, (6, 20), generator=generator)
        (result,) = made([gradient, indices], [place])
        assert result is place
        assert torch.equal(place, torch.ops.aten.embedding_dense_backward(gradient, indices, ROWS, padding, False))

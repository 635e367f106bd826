"""cirh.MaskFromTopK: exactly so many, beside torch's topk."""

import pytest
import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.highest_elements import mask_from_topk
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_it_is_the_mask_of_what_topk_finds(dimension: int) -> None:
    values = torch.randn(7, 9)
    for count in range(-1, values.shape[dimension] + 2):
        expected = torch.zeros(7, 9, dtype=torch.bool)
        chosen = min(max(count, 0), values.shape[dimension])
        expected.scatter_(dimension, values.topk(chosen, dimension).indices, True)
        assert torch.equal(mask_from_topk(values, torch.tensor(count), dimension), expected)


def test_each_row_may_have_its_own_count() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    mask = mask_from_topk(values, torch.tensor([[1], [2]]), 1)
    assert mask.tolist() == [[True, False, False], [False, True, True]]
    assert torch.equal(mask_from_topk(values.T, torch.tensor([[1, 2]]), 0), mask.T)


def test_of_equal_elements_the_first_are_chosen() -> None:
    values = torch.tensor([0.0, 5.0, 0.0, 0.0, torch.inf])
    for count, chosen in ((3, [0, 1, 4]), (4, [0, 1, 2, 4])):
        assert mask_from_topk(values, torch.tensor(count), 0).nonzero().flatten().tolist() == chosen
    values[2] = values[3] = torch.nan
    for count, chosen in ((1, [2]), (3, [2, 3, 4]), (5, [0, 1, 2, 3, 4])):
        assert mask_from_topk(values, torch.tensor(count), 0).nonzero().flatten().tolist() == chosen


def test_a_count_that_is_none_is_refused() -> None:
    builder = GraphBuilder()
    input = builder.argument(tensor_type((3, 4), torch.float32), input="input_0")
    for shape, dtype, text in (((), torch.float32, "not of integers"), ((3,), torch.int64, "k of shape")):
        with pytest.raises(CirhError, match=text):
            builder.op("cirh.MaskFromTopK", [input, builder.splat(1, shape, dtype)], {"dimension": 1})

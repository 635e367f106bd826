"""cstorch.nn.functional, scopes, what is absent; losses as a step records them, at the edges."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_steps import trace

import cstorch
from cstorch._internal.lowering import lower
from cstorch._internal.tracing.rewrites import losses
from cstorch.errors import TraceError
from waferbox.cirh.execution.kernel import Kernel, OperationFailed
from waferbox.cirh.text.printer import print_module


def test_functions() -> None:
    values = torch.randn(2, 3, 4)
    assert torch.equal(cstorch.nn.functional.one_hot(torch.tensor([[2, 0]]), 3), F.one_hot(torch.tensor([[2, 0]]), 3))
    for dim in (0, 1, 2, -1):
        bias = torch.randn(values.shape[dim])
        expected = (values.movedim(dim, -1) + bias).movedim(-1, dim)
        assert torch.equal(cstorch.nn.functional.bias_add(values, bias, dim), expected)
    assert all(map(torch.equal, cstorch.nn.functional.unbind(values), values))
    scope = cstorch.nn.Scope("encoder")
    assert scope.exit(scope(values)) is values
    assert cstorch.nn.functional.scope_boundary(values, "begin", "encoder") is values
    assert cstorch.nn.Parameter is nn.Parameter


def test_products_with_chosen_experts() -> None:
    values, weight = torch.randn(2, 3, 2, 4), torch.randn(5, 7, 4)
    chosen = torch.randint(0, 7, (2, 3, 2))
    expected = torch.einsum("bski,bske,oei->bsko", values, F.one_hot(chosen, 7).float(), weight)
    torch.testing.assert_close(cstorch.nn.functional.sparse_matmul(values, chosen, weight), expected)


def test_products_of_some_rows() -> None:
    rows, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.int16)
    whole = rows @ weight.t()
    assert torch.equal(cstorch.nn.functional.matmul(weight, rows), whole)
    masked = cstorch.nn.functional.sparse_act_matmul(rows, mask, weight, dense_capacity=2)
    torch.testing.assert_close(masked, whole * mask[..., None])
    with pytest.raises(ValueError, match="a number for each row"):
        cstorch.nn.functional.sparse_act_matmul(rows, mask[:, :2], weight)
    ranged = cstorch.nn.functional.ranged_matmul(weight, rows, torch.tensor([2, 0]))
    assert torch.equal(ranged[0, :2], whole[0, :2])
    assert not ranged[0, 2:].any()
    assert not ranged[1].any()


def test_masks_and_counts() -> None:
    values = torch.tensor([0.0, 2, 3, 5, 4, 1, 6])
    largest = cstorch.nn.functional.nth_order_statistic(values, 3, 0)
    assert (largest.dtype, largest.tolist()) == (torch.int16, [0, 0, 0, 1, 1, 0, 1])
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1])
    counted = cstorch.nn.functional.conditional_arange(mask, torch.tensor(2), torch.tensor(7), torch.int32)
    assert (counted.dtype, counted.tolist()) == (torch.int32, [-1, 2, 9, 16, -1, -1, 23])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_recorded_ctc_is_that_of_torch_where_labels_repeat_are_absent_or_do_not_fit(
    reduction: str, zero_infinity: bool
) -> None:
    scores = torch.randn(4, 5, 3, dtype=torch.float64)
    targets = torch.tensor([[1, 1], [2, 1], [1, -1], [2, 2], [1, 7]])  # what is behind a target is not read
    lengths = torch.tensor([4, 2, 3, 2, 4]), torch.tensor([2, 2, 1, 2, 0])  # the fourth does not fit
    found = losses.ctc_loss(scores.log_softmax(-1), targets, *lengths, 0, reduction, zero_infinity)
    expected = F.ctc_loss(scores.log_softmax(-1), targets, *lengths, 0, reduction, zero_infinity)
    assert not (reduction == "none" and not zero_infinity) or expected.isinf().any()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_losses_that_cannot_be_cut_are_refused_with_the_line() -> None:
    scores, lengths = torch.randn(4, 2, 3), torch.tensor([4, 4])
    with pytest.raises(TraceError, match=r"test_nn_functions\.py:.*give targets as a matrix"):
        trace(lambda batch: F.ctc_loss(batch[0], batch[1], batch[2], batch[2]), (scores, torch.ones(2).long(), lengths))
    with pytest.raises(TraceError, match=r"test_nn_functions\.py:.*a row for each sample"):
        trace(lambda batch: F.multi_margin_loss(batch[0], batch[1]), (scores[0, 0], torch.tensor(1)))


def test_one_hot_fails_for_a_class_that_there_is_not() -> None:
    module = lower(trace(lambda labels: F.one_hot(labels, 5), torch.zeros(2, 3, dtype=torch.int64)))
    kernel, labels = Kernel.build(print_module(module)), torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.equal(kernel([labels])[0], F.one_hot(labels, 5))
    for wrong in (5, -1):
        with pytest.raises(OperationFailed, match="out of bounds"):
            kernel([labels.masked_fill(labels == 4, wrong)])

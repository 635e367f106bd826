"""Labels, indices and strings that a function of torch cannot take: which argument is wrong, and the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cstorch._internal.tracing import trace_step
from cstorch.errors import TraceError, TraceTypeError

SCORES = torch.zeros(2, 3)
FLOATS = torch.zeros(2)
LABELS = torch.zeros(2, dtype=torch.int64)

Step = Callable[[Any, Any], Any]


def trace(step: Step, *batch: Any) -> None:
    trace_step(lambda given: step(*given), batch, {}, {}, lambda result: [("out", result)])


@pytest.mark.parametrize(
    ("step", "given", "message"),
    [
        (F.cross_entropy, FLOATS, "`cross_entropy` takes integers as its argument `target`, the numbers of classes, "),
        (nn.CrossEntropyLoss(), FLOATS, r"a tensor of torch.float32. Convert it: `labels.long\(\)`"),
        (F.cross_entropy, LABELS.to(torch.uint8), "`cross_entropy` takes integers .* a tensor of torch.uint8"),
        (F.nll_loss, FLOATS, "`nll_loss` takes integers"),
        (F.multi_margin_loss, FLOATS, "`multi_margin_loss` takes integers"),
        (F.cross_entropy, LABELS[:, None], r"labels \(`target`\) of the shape \(2, 1\) .*`labels.squeeze\(-1\)`"),
        (F.cross_entropy, FLOATS[:, None], r"`labels.squeeze\(-1\).long\(\)`"),
        (F.nll_loss, LABELS[:, None], r"`nll_loss` takes one label for each row"),
        (F.cross_entropy, SCORES.long(), r"one-hot are numbers of classes by `labels.argmax\(1\)`"),
        (F.cross_entropy, LABELS[:1], r"need \(2,\). Give each row of the scores one label"),
        (lambda x, y: F.cross_entropy(x[:, None], y[:, None]), LABELS, r"`scores.movedim\(-1, 1\)`"),
        (F.binary_cross_entropy_with_logits, SCORES.long(), r"takes floating point .*`labels.float\(\)`"),
        (F.binary_cross_entropy_with_logits, FLOATS, r"two tensors of one shape.* \(2, 3\) and `target` .* \(2,\)"),
        (F.mse_loss, FLOATS, "`mse_loss` compares two tensors of one shape"),
        (lambda x, y: F.embedding(y, x), FLOATS, r"`embedding` takes .* the numbers of rows.*`indices.long\(\)`"),
        (lambda x, y: x.gather(1, y), FLOATS[:, None], "`gather` takes integers as its argument `index`, the places"),
        (lambda x, y: x[y], FLOATS, "`__getitem__` takes integers"),
        (lambda x, y: x.scatter_add(1, y, x), FLOATS[:, None], "`scatter_add` takes integers"),
        (lambda x, y: x.clone().index_add_(0, y, x), FLOATS, "`index_add_` takes integers"),
        (lambda x, y: torch.index_select(x, 0, y), FLOATS, "`index_select` takes integers"),
    ],
)
def test_the_argument_that_is_wrong_is_named(step: Step, given: torch.Tensor, message: str) -> None:
    with pytest.raises(TraceError, match=rf"(?s)^At .*\.py:\d+ .*{message}"):
        trace(step, SCORES, given)


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (F.cross_entropy, LABELS),
        (F.cross_entropy, LABELS.int()),
        (F.cross_entropy, SCORES.softmax(1)),
        (lambda x, y: x.index_select(0, y), LABELS),
    ],
)
def test_what_is_right_is_left_alone(step: Step, given: torch.Tensor) -> None:
    trace(step, SCORES, given)


def test_an_error_of_something_else_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
        trace(lambda x, y: x @ y, SCORES, torch.zeros(2, 2))
    assert not isinstance(caught.value, TraceError)


@pytest.mark.parametrize("strings", [("cat", "dog"), ["cat", "dog"], "cat", {"names": ["cat", "dog"]}])
@pytest.mark.parametrize(
    "step",
    [
        F.cross_entropy,
        lambda x, y: x.add(y),
        lambda x, y: x + y,
        lambda x, y: F.cross_entropy(x, y.long()),
    ],
)
def test_strings_that_reach_an_operation_are_named(step: Step, strings: Any) -> None:
    if isinstance(strings, dict):
        step, given = (lambda inner: lambda x, y: inner(x, y["names"]))(step), strings
    else:
        given = strings
    with pytest.raises(
        TraceTypeError, match=r"(?s)^At .*\.py:\d+ the step computes with strings, .* at \[1\].*torch.tensor"
    ):
        trace(step, SCORES, given)


def test_an_error_beside_strings_stays_as_it_is() -> None:
    with pytest.raises(KeyError, match="nothing"):
        trace(lambda x, y: {"else": 0}["nothing"], SCORES, ["cat", "dog"])
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        trace(lambda x, y: x + {}, SCORES, ["cat", "dog"])
    assert not isinstance(caught.value, TraceError)

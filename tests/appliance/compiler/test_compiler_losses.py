"""Every loss of cstorch.nn: forward and backward on wafers that have parts of the batch, beside torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from torch import nn
from torch.nn import functional as F

from cstorch import nn as cstorch_nn

pytestmark = pytest.mark.parity

CLASSES = 4
Batch = tuple[torch.Tensor, ...]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def shares(*shape: int) -> torch.Tensor:
    return torch.rand(BATCH, *shape, dtype=torch.float64)


def labels() -> torch.Tensor:
    return torch.randint(CLASSES, (BATCH,))


def signs(*shape: int) -> torch.Tensor:
    return torch.randint(2, (BATCH, *shape)) * 2 - 1


def sequences() -> Batch:
    targets = torch.randint(1, CLASSES, (BATCH, 2))
    targets[0] = targets[0, 0]  # equal labels need a blank between them
    return numbers(5, 5), targets, torch.randint(4, 6, (BATCH,)), torch.randint(0, 3, (BATCH,))


def weights() -> torch.Tensor:
    return torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


def plain(loss: Any, scores: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    return loss(scores, *targets)


def sigmoid(loss: Any, scores: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    return loss(scores.sigmoid(), *targets)


def logarithms(loss: Any, scores: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    return loss(scores.log_softmax(-1), *targets)


def times_first(loss: Any, scores: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    return loss(scores.log_softmax(-1).transpose(0, 1), *targets)


Call = Callable[..., torch.Tensor]
# Name, settings, how it is called, and what makes a batch: the features first.
CASES: list[tuple[str, dict[str, Any], Call, Callable[[], Batch]]] = [
    ("BCELoss", {}, sigmoid, lambda: (numbers(5), shares(CLASSES))),
    ("BCEWithLogitsLoss", {"pos_weight": weights()}, plain, lambda: (numbers(5), shares(CLASSES))),
    ("CrossEntropyLoss", {"weight": weights(), "ignore_index": 1}, plain, lambda: (numbers(5), labels())),
    ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": 2}, plain, lambda: (numbers(5), labels())),
    ("NLLLoss", {"weight": weights(), "ignore_index": 1}, logarithms, lambda: (numbers(5), labels())),
    ("MSELoss", {}, plain, lambda: (numbers(5), numbers(CLASSES))),
    ("L1Loss", {"reduction": "sum"}, plain, lambda: (numbers(5), numbers(CLASSES))),
    ("SmoothL1Loss", {}, plain, lambda: (numbers(5), numbers(CLASSES))),
    ("HuberLoss", {"delta": 0.7}, plain, lambda: (numbers(5), numbers(CLASSES))),
    ("KLDivLoss", {"reduction": "batchmean"}, logarithms, lambda: (numbers(5), numbers(CLASSES).softmax(-1))),
    ("CTCLoss", {}, times_first, sequences),
    ("CosineEmbeddingLoss", {"margin": 0.1}, plain, lambda: (numbers(5), numbers(CLASSES), signs())),
    ("GaussianNLLLoss", {"full": True}, plain, lambda: (numbers(5), numbers(CLASSES), shares(CLASSES) - 0.2)),
    ("HingeEmbeddingLoss", {}, plain, lambda: (numbers(5), signs(CLASSES))),
    ("MarginRankingLoss", {"margin": 0.2}, plain, lambda: (numbers(5), numbers(CLASSES), signs(CLASSES))),
    ("MultiLabelSoftMarginLoss", {"weight": weights()}, plain, lambda: (numbers(5), shares(CLASSES).round())),
    ("MultiMarginLoss", {"weight": weights(), "p": 2}, plain, lambda: (numbers(5), labels())),
    ("PoissonNLLLoss", {"full": True}, plain, lambda: (numbers(5), shares(CLASSES) * 5)),
    ("TripletMarginLoss", {"swap": True}, plain, lambda: (numbers(5), numbers(CLASSES), numbers(CLASSES))),
    ("TripletMarginWithDistanceLoss", {}, plain, lambda: (numbers(5), numbers(CLASSES), numbers(CLASSES))),
]


class Model(nn.Module):
    def __init__(self, loss: nn.Module, call: Call) -> None:
        super().__init__()
        self.scores = nn.Linear(5, CLASSES)
        self.loss = loss
        self.call = call

    def forward(self, features: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return self.call(self.loss, self.scores(features), *targets)


def build(model: Any) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        return loss

    return step


@pytest.mark.parametrize(("name", "settings", "call", "make"), CASES, ids=[case[0] for case in CASES])
def test_a_loss_on_two_wafers_is_that_of_torch(
    name: str, settings: dict[str, Any], call: Call, make: Callable[[], Batch]
) -> None:
    torch.manual_seed(0)
    batches = [make() for _ in range(2)]
    if name == "GaussianNLLLoss":  # torch refuses negative variances, whose values a traced step does not know
        batches = [(features, target, var.abs()) for features, target, var in batches]
    ours = getattr(cstorch_nn, name)(use_autogen=True, **settings)
    assert isinstance(ours, getattr(nn, name))
    Traced(build, Model(ours, call), batches[0]).check(batches, [(2, 1)])


@pytest.mark.parametrize("loss", [cstorch_nn.DiceLoss(CLASSES), cstorch_nn.DiceCELoss(CLASSES, True, wd=0.3)])
def test_dice_losses_on_two_wafers_are_those_on_the_cpu(loss: nn.Module) -> None:
    torch.manual_seed(0)

    def segmented(loss: Any, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return loss(scores.movedim(-1, 1), classes, (BATCH, 1, 3, 2))

    batches = [(numbers(3, 2, 5), torch.randint(CLASSES, (BATCH, 1, 6))) for _ in range(2)]
    Traced(build, Model(loss, segmented), batches[0]).check(batches, [(1, 1), (2, 1)])


def test_dice_losses_are_what_their_definition_says() -> None:
    scores, classes = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    shares, chosen = scores.softmax(1), F.one_hot(classes, 3).movedim(-1, 1)
    coefficients = [
        2 * (shares[n, c] * chosen[n, c]).sum() / (shares[n, c].sum() + chosen[n, c].sum())
        for n in range(2)
        for c in (1, 2)
    ]
    expected = 1 - sum(coefficients) / 4
    loss = cstorch_nn.DiceLoss(3)(scores, classes)
    torch.testing.assert_close(loss, expected)
    both = cstorch_nn.DiceCELoss(3, False, wc=0.25, wd=0.75)(scores, classes.unsqueeze(1), (2, 1, 4, 4))
    torch.testing.assert_close(both, 0.25 * F.cross_entropy(scores, classes) + 0.75 * expected)
    hard = cstorch_nn.DiceLoss(3, use_softmax=False, use_argmax=True, include_background=True)
    assert float(hard(chosen.float(), classes)) == pytest.approx(0, abs=1e-6)

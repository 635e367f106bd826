"""Cross entropy of large logits: fused with the product that makes them, which are never whole, and right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, loss_and_gradients
from torch import nn
from torch.nn import functional as F
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.target import Half, Precision, Target
from appliance.compiler.passes import fuse_linear_cross_entropy
from appliance.compiler.pipeline import CompiledStep
from appliance.compiler.pipelined.regions import NOMINAL
from appliance.compiler.report.builder import make_report
from waferbox.cirh.calls import linear_cross_entropy
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import body_ops

pytestmark = pytest.mark.parity

TOKENS, WIDTH, CLASSES = 3, 5, 11
FUSED = ["cirh.LinearCrossEntropy", "cirh.LinearCrossEntropyGrad"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_linear_cross_entropy, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_BYTES", 4 * CLASSES * 8)  # four rows at a time


class Language(nn.Module):
    """Tokens to logits, by a head of its own or by the embedding."""

    def __init__(
        self, *, tied: bool = False, bias: bool = False, scale: float = 1.0, cap: float | None = None, loss: Loss
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = None if tied else nn.Linear(WIDTH, CLASSES, bias=bias)
        self.scale, self.cap, self.loss = scale, cap, loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.body(self.embedding(tokens)))
        logits = x @ self.embedding.weight.t() if self.head is None else self.head(x)
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return self.loss(logits.view(-1, CLASSES), labels.view(-1))


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * (labels % 3)).sum() / 7


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
    "ignored": lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=2),
    "weighted": weighted,
    "smoothed": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1, ignore_index=2),
    "with z loss": lambda logits, labels: (
        F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1, keepdim=True).square().mean()
    ),
    "of log probabilities": lambda logits, labels: F.nll_loss(F.log_softmax(logits, -1), labels),
}


def training(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        return loss_and_gradients(model, model(*batch))

    return step


def validation(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        with torch.no_grad():
            return model(*batch)

    return step


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator) for _ in range(2))
    return tokens, labels


def has_logits(module: ModuleOp) -> bool:
    """Whether an operation makes logits, or anything in their shape."""
    of_logits = {(BATCH * TOKENS, CLASSES), (BATCH, TOKENS, CLASSES)}
    return not of_logits.isdisjoint(types.shape(result) for op in body_ops(module) for result in op.results)


@pytest.mark.parametrize("head", ["tied", "bias", "no bias"])
@pytest.mark.parametrize("loss", LOSSES)
def test_training(loss: str, head: str) -> None:
    torch.manual_seed(5)
    model = Language(tied=head == "tied", bias=head == "bias", scale=0.5 if loss == "sum" else 1.0, loss=LOSSES[loss])
    traced = Traced(training, model, batch(1))
    module = CompiledStep(traced.text).module
    assert [op.name for op in body_ops(module) if "CrossEntropy" in op.name] == FUSED
    assert not has_logits(module)
    traced.check([batch(1), batch(2)], [(1, 1), (2, 1), (3, 2)])
    traced.check([batch(1)], [(1, 1)], micro_batches=2)


@pytest.mark.parametrize("loss", ["mean", "smoothed", "with z loss", "of log probabilities"])
def test_capped_logits(loss: str) -> None:
    torch.manual_seed(5)
    model = Language(bias=True, scale=3.0, cap=0.7, loss=LOSSES[loss])
    traced = Traced(training, model, batch(1))
    module = CompiledStep(traced.text).module
    assert [op.name for op in body_ops(module) if "CrossEntropy" in op.name] == FUSED
    assert not has_logits(module)
    traced.check([batch(1), batch(2)], [(1, 1), (2, 1), (3, 2)])


def test_logits_that_are_capped_twice_stay() -> None:
    def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(2 * torch.tanh(logits), labels)

    torch.manual_seed(5)
    traced = Traced(training, Language(cap=0.7, loss=twice), batch(1))
    assert FUSED[0] not in [op.name for op in body_ops(CompiledStep(traced.text).module)]
    traced.check([batch(1)], [(1, 1), (2, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels)

    torch.manual_seed(5)
    model = Language(loss=loss).to(dtype)
    traced = Traced(training, model, batch(1), double=False)
    module = CompiledStep(traced.text).module
    assert [op.name for op in body_ops(module) if "CrossEntropy" in op.name] == FUSED
    traced.check([batch(1)], [(1, 1), (2, 1)], rtol=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("half", [Half.BFLOAT16, Half.FLOAT16, Half.CBFLOAT16])
def test_mixed_precision(half: Half) -> None:
    torch.manual_seed(5)
    traced = Traced(training, Language(tied=True, loss=weighted), batch(1), double=False)
    traced.check([batch(1)], [(1, 1), (2, 1)], rtol=2e-2, precision=Precision(half=half, level=1))


@pytest.mark.parametrize("cap", [None, 0.7])
def test_a_loss_without_a_gradient(cap: float | None) -> None:
    torch.manual_seed(5)
    traced = Traced(validation, Language(bias=True, cap=cap, loss=weighted), batch(1))
    module = CompiledStep(traced.text).module
    assert "cirh.LinearCrossEntropy" in [op.name for op in body_ops(module)]
    assert not has_logits(module)
    traced.check([batch(1)], [(1, 1), (2, 1)])


def test_frozen_weights_have_no_gradient() -> None:
    def frozen(model: Any) -> Callable[[Any], Any]:
        model.head.requires_grad_(False)

        def step(batch: Any) -> Any:
            loss = model(*batch)
            loss.backward()
            gradient = model.body.weight.grad.clone()
            model.zero_grad()
            return [loss.detach(), gradient]

        return step

    torch.manual_seed(5)
    traced = Traced(frozen, Language(bias=True, loss=F.cross_entropy), batch(1))
    (gradient,) = (op for op in body_ops(CompiledStep(traced.text).module) if op.name == FUSED[1])
    assert len(gradient.results) == 1
    traced.check([batch(1)], [(1, 1), (2, 1)])


def test_logits_that_others_read_stay() -> None:
    def also(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            tokens, labels = batch
            logits = model.head(model.embedding(tokens)).view(-1, CLASSES)
            loss = F.cross_entropy(logits, labels.view(-1))
            loss.backward()
            gradient = model.head.weight.grad.clone()
            model.zero_grad()
            return [loss.detach(), gradient, logits.argmax(-1)]

        return step

    torch.manual_seed(5)
    traced = Traced(also, Language(bias=True, loss=F.cross_entropy), batch(1))
    names = [op.name for op in body_ops(CompiledStep(traced.text).module)]
    assert FUSED[0] not in names
    traced.check([batch(1)], [(1, 1), (2, 1)])


def needed_bytes(text: str) -> int:
    plan = CompiledStep(text).plan(Target(num_csx=1, num_shards=1))
    return make_report(plan, "", NOMINAL).memory.needed_bytes


def test_the_wafer_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = 4096

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, classes)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), labels)

    rows = 8 * BATCH * TOKENS
    text = Traced(training, Large(), (torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)), double=False).text
    fused = needed_bytes(text)
    monkeypatch.setattr(fuse_linear_cross_entropy, "LEAST_BYTES", 1 << 60)
    written = needed_bytes(text)
    logits = rows * classes * 4
    assert written > 2 * logits
    assert fused < written - logits

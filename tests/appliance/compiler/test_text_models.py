"""Transformers: whole steps on simulated clusters give what plain torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Getters, Step, Traced
from model_zoo_text import IGNORED, MODELS, TextModel
from torch import nn

from cstorch._internal.state import Registry, named_getters
from cstorch.metrics import AccuracyMetric, PerplexityMetric
from cstorch.optim import SGD, AdamW, Optimizer

pytestmark = pytest.mark.parity

CLUSTERS = [(1, 1), (2, 2), (3, 1)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def training(
    model_of: TextModel, make: Callable[[Any], Optimizer], clip: float | None
) -> Callable[[Any], tuple[Step, Getters]]:
    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        optimizer = make(model.parameters())
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> Any:
            loss, _ = model_of.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            outputs = [loss]
            if clip is not None:
                outputs.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            return outputs

        return step, dict(named_getters(registry))

    return build


def evaluation(model_of: TextModel) -> Callable[[Any], tuple[Step, Getters]]:
    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        accuracy, perplexity = AccuracyMetric("accuracy"), PerplexityMetric("perplexity")
        registry.register("metric", accuracy)
        registry.register("metric", perplexity)
        model.eval()

        @torch.no_grad()
        def step(batch: Any) -> Any:
            loss, logits = model_of.loss(model, batch)
            labels = model_of.labels(batch)
            counts = (labels != IGNORED).to(loss.dtype)
            total = perplexity(labels, loss * counts.sum(), weights=counts)
            return [loss, total, accuracy(labels, logits.argmax(-1), weights=counts)]

        return step, dict(named_getters(registry))

    return build


@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_training_with_sgd(model_of: TextModel) -> None:
    batches = [model_of.batch() for _ in range(2)]
    build = training(model_of, lambda p: SGD(p, lr=0.1, momentum=0.9), None)
    Traced(build, model_of.make(), batches[0]).check(batches, CLUSTERS)


@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_evaluation(model_of: TextModel) -> None:
    batches = [model_of.batch() for _ in range(2)]
    Traced(evaluation(model_of), model_of.make(), batches[0]).check(batches, [(1, 1), (3, 2)])


@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_training_with_adamw_and_clipping(model_of: TextModel) -> None:
    batches = [model_of.batch() for _ in range(2)]
    # The bias of keys has the gradient zero but for rounding, which a small epsilon would turn into steps of full size.
    build = training(model_of, lambda p: AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-3), 0.5)
    Traced(build, model_of.make(), batches[0]).check(batches, [(1, 2), (2, 1)])

"""Convolutional networks, vision transformers and recommenders: every number of wafers gives what plain torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Getters, Step, Traced
from model_zoo_images import DLRM, ResNet, ViT, clicks, images
from torch import nn
from torch.nn import functional as F

from cstorch._internal.state import Registry, named_getters
from cstorch.optim import SGD, AdamW, Optimizer

pytestmark = pytest.mark.parity

CLUSTERS = [(1, 1), (2, 2), (3, 1)]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "resnet": (ResNet, images),
    "vit": (ViT, images),
    "dlrm": (DLRM, clicks),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adamw-clip": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def scores(model: Any, inputs: Any) -> torch.Tensor:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def training(make: Callable[[Any], Optimizer], clip: bool) -> Callable[[Any], tuple[Step, Getters]]:
    def build(model: Any) -> tuple[Step, Getters]:
        model.train()
        registry = Registry()
        optimizer = make(model.parameters())
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> Any:
            inputs, labels = batch
            loss = F.cross_entropy(scores(model, inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = [nn.utils.clip_grad_norm_(model.parameters(), 0.5)] if clip else []
            optimizer.step()
            return [loss, *norm]

        return step, dict(named_getters(registry))

    return build


def evaluation(model: Any) -> Step:
    model.eval()

    def step(batch: Any) -> Any:
        inputs, labels = batch
        logits = scores(model, inputs)
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).double().mean(), logits

    return step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, optimizer: str) -> None:
    model, batches = MODELS[name][0](), MODELS[name][1]()
    build = training(OPTIMIZERS[optimizer], optimizer == "adamw-clip")
    Traced(build, model, batches[0]).check(batches, CLUSTERS)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name: str) -> None:
    model, batches = MODELS[name][0](), MODELS[name][1]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.get_buffer("running_mean"))
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
    Traced(evaluation, model, batches[0]).check(batches, CLUSTERS)

"""Training of models of transformers: one wafer and two give what plain torch gives."""

from typing import Any

import pytest
import torch
from compiled_steps import Getters, Step, Traced
from hugging_face_models import MODELS, loss

from cstorch._internal.state import Registry, named_getters
from cstorch.optim import AdamW

pytestmark = pytest.mark.parity

STEPS = 3


def training(model: Any) -> tuple[Step, Getters]:
    model.train()
    registry = Registry()
    # With a smaller epsilon the gradients that are zero but for rounding (a key's bias) make steps of full size.
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    registry.register("optimizer", optimizer)

    def step(batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value.detach()

    return step, dict(named_getters(registry))


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_what_plain_torch_gives(name: str) -> None:
    torch.manual_seed(0)
    batches = [MODELS[name].batch() for _ in range(STEPS)]
    Traced(training, MODELS[name].make(), batches[0], double=False).check(batches, [(1, 1), (2, 2)], rtol=1e-5)

"""The work of finding what a shard can run grows with the step, not with its square."""

from functools import partial
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from torch import nn

from appliance.compiler.memoryx_schedule.reads import Frontier
from appliance.compiler.wafer_schedule import streams


class Layer(nn.Linear):
    """A layer with a number that shrinks after each step, unless the gradients of the step are large."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("shrinking", torch.tensor(1.0))


def training(model: Any) -> tuple[Step, Getters]:
    """The next numbers of all layers can be computed as the step begins, but are read after its last gradient."""

    def step(batch: Any) -> Any:
        model(batch).square().mean().backward()
        norms = [layer.weight.grad.norm() for layer in model]
        is_small = sum(reversed(norms)) < 1.0
        for layer in model:
            layer.shrinking.copy_(torch.where(is_small, layer.shrinking * 0.9, layer.shrinking))
        return norms

    return step, {f"{name}.shrinking": partial(layer.get_buffer, "shrinking") for name, layer in model.named_children()}


def examined(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The operations that are looked at, as often as they are, in a compile of a model with equal layers."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    traced = Traced(training, model, torch.randn(BATCH, 6, dtype=torch.float64))
    in_order, count = Frontier.in_order, 0

    def counted(self: Frontier, within: Any = None) -> Any:
        nonlocal count
        found = in_order(self, within)
        count += len(found)
        return found

    with monkeypatch.context() as patches:
        patches.setattr(Frontier, "in_order", counted)
        patches.setattr(streams, "COALESCE_BYTES", 0)  # a message for each gradient, however small
        traced.plan(1)
    return count


def test_twice_the_layers_are_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = examined(8, monkeypatch), examined(16, monkeypatch)
    assert few < many < 2.2 * few

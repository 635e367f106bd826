"""cstorch.name_scope: parts of a module become layers of their own, with the same numbers."""

from collections import OrderedDict

import torch
from compiled_steps import BATCH, Step, Traced
from test_compile_report import report
from torch import nn

import cstorch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 5))
        self.second = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with cstorch.name_scope("mixing"):
            y = torch.tanh(x @ self.first)
        return x + y @ self.second


def build(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.sub_(0.1 * p.grad)
            p.grad = None
        return loss.detach()

    return step


def test_a_part_is_a_layer_and_changes_no_number() -> None:
    model = nn.Sequential(OrderedDict(head=Block(), tail=Block()))
    traced = Traced(build, model, torch.randn(BATCH, 5, dtype=torch.float64))
    traced.check([torch.randn(BATCH, 5, dtype=torch.float64) for _ in range(2)], [(1, 1), (2, 2)])
    assert {"head.mixing", "tail.mixing"} <= {layer.layer for layer in report(traced).layers}

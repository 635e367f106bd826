"""Steps whose weights are read in place, for tests of what is sent where and when."""

from typing import Any

import torch
from compiled_steps import BATCH, Traced
from torch import nn

FEW = [(1, 1), (2, 2), (3, 3)]
WIDE = 80  # a weight of WIDE x WIDE float64 has more than INLINE_BYTES: the wafers read it in place


class Wide(nn.Module):
    def __init__(self, layers: int = 2, state: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(layers))
        if state:
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("table", torch.randn(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rows(steps: int = 3, width: int = WIDE) -> list[torch.Tensor]:
    return [torch.randn(BATCH, width, dtype=torch.float64) for _ in range(steps)]


def sgd(parameters: Any, rate: float = 0.1) -> None:
    parameters = list(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.grad * rate)
    for parameter in parameters:
        parameter.grad = None


def trained(model: Any, loss: torch.Tensor, rate: float = 0.1) -> torch.Tensor:
    loss.backward()
    sgd(model.parameters(), rate)
    return loss.detach()


def mean_step(model: Any) -> Any:
    return lambda batch: trained(model, model(batch).square().mean())


def check(build: Any, model: nn.Module, batches: Any = None, clusters: Any = FEW, **settings: Any) -> Traced:
    batches = batches or rows()
    traced = Traced(build, model, batches[0])
    traced.check(batches, clusters, **settings)
    return traced

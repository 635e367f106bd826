"""Batches whose tensors differ in dimension 0, as those of graphs do: one wafer has them whole."""

from collections.abc import Callable

import pytest
import torch
from compiled_steps import Step, Traced
from torch import nn
from torch.nn import functional as F

from appliance.compiler.core.errors import CompileError

pytestmark = pytest.mark.parity

NODES, EDGES, GRAPHS = 10, 24, 3
AddUp = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def graphs(seed: int) -> tuple[torch.Tensor, ...]:
    """Nodes, edges, which graph each node belongs to, and a label for each graph."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(NODES, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, NODES, (2, EDGES), generator=generator),
        torch.randint(0, GRAPHS, (NODES,), generator=generator).sort().values,
        torch.randint(0, 4, (GRAPHS,), generator=generator),
    )


class Convolution(nn.Module):
    """Sends along edges, and pools the nodes of each graph, by the given way of adding up."""

    def __init__(self, add_up: AddUp) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.add_up = add_up

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = x + self.add_up(x[edges[0]], edges[1], NODES)
        degree = torch.zeros(NODES, dtype=x.dtype, device=x.device).index_add(
            0, edges[1], torch.ones_like(x[edges[0], 0])
        )
        x = F.relu(self.norm(x / degree.clamp(min=1).unsqueeze(1)))
        return self.two(self.add_up(x, graph, GRAPHS))


def index_add(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_zeros(count, values.shape[1]).index_add_(0, index, values)


def scatter_add(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_zeros(count, values.shape[1]).scatter_add(0, index.unsqueeze(1).expand_as(values), values)


def scatter_reduce(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    index = index.unsqueeze(1).expand_as(values)
    return values.new_zeros(count, values.shape[1]).scatter_reduce(0, index, values, "amax", include_self=False)


def training(model: nn.Module) -> Step:
    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        *graph, labels = batch
        loss = F.cross_entropy(model(*graph), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        return loss

    return step


@pytest.mark.parametrize("add_up", [index_add, scatter_add, scatter_reduce])
def test_graphs_train_on_one_wafer(add_up: AddUp) -> None:
    traced = Traced(training, Convolution(add_up), graphs(0))
    traced.check([graphs(seed) for seed in range(3)], [(1, 1), (1, 2)])


def test_several_wafers_are_refused_with_the_way_out() -> None:
    with pytest.raises(CompileError, match=r"2 rows, other inputs have 10.*use num_csx=1"):
        Traced(training, Convolution(index_add), graphs(0)).plan(2)

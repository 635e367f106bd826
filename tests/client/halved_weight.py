"""A model whose weight every step halves, on a cluster that is a fake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_cluster import FakeCluster, State
from torch import nn

import cstorch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.utils.data import DataExecutor, DataLoader

NAMES = ["state.model.weight", "state.model.bias"]


def halve(state: State, step: int) -> dict[str, torch.Tensor]:
    weight = next(name for name in state if name.endswith("weight"))
    state[weight].mul_(0.5)
    return {"output_loss": torch.tensor(float(step)), "output_values_0": torch.tensor(float(step))}


def input_fn() -> list[torch.Tensor]:
    return [torch.ones(4, 2)]


class Setup:
    """A linear model whose weight is halved in every step."""

    def __init__(self, cluster: FakeCluster, tmp_path: Path, **settings: Any) -> None:
        config = ClusterConfig(mgmt_address=cluster.address, num_csx=settings.pop("num_csx", 1))
        self.backend = cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config, **settings)
        self.model = nn.Linear(2, 1)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        self.compiled = cstorch.compile(self.model)
        self.traces = 0

        @cstorch.trace
        def step(batch: torch.Tensor) -> torch.Tensor:
            self.traces += 1
            loss = self.compiled(batch).mean()
            with torch.no_grad():
                self.model.weight.mul_(0.5)
            return loss

        self.step = step

    def executor(self, num_steps: int = 3, **settings: Any) -> DataExecutor:
        return DataExecutor(DataLoader(input_fn), num_steps=num_steps, **settings)

    def weight(self) -> float:
        return float(self.model.weight.detach().cpu().flatten()[0])


def run(executor: DataExecutor, body: Callable[[Any], object]) -> None:
    for batch in executor:
        body(batch)

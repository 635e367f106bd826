"""A user's script on a cluster that is a fake: a model, an optimizer, and loops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_cluster import FakeCluster, State
from torch import nn

import cstorch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.utils.data import DataExecutor, DataLoader


def step_of_cluster(state: State, step: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(float(step)) for name in ("output_values_0", "output_loss", "output_value")}


class Script:
    """A user's script: a model, an optimizer, and loops."""

    def __init__(self, folder: Path, cluster: FakeCluster | None = None, **settings: Any) -> None:
        address = cluster.address if cluster is not None else None
        config = ClusterConfig(mgmt_address=address, num_csx=settings.pop("num_csx", 1))
        self.backend = cstorch.backend(
            "CSX", artifact_dir=folder, cluster_config=config, validate_only=cluster is None, **settings
        )
        self.model = nn.Linear(2, 2)
        self.compiled = cstorch.compile(self.model)
        self.optimizer: torch.optim.Optimizer = cstorch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self, batch: Any) -> torch.Tensor:
        loss = self.compiled(batch).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def loop(self, body: Callable[..., Any], data: Any = None, num_steps: int = 1, **settings: Any) -> None:
        batches = [torch.ones(4, 2)] if data is None else data
        for batch in DataExecutor(DataLoader(lambda: batches), num_steps=num_steps, **settings):
            body(batch)

    def step(self, batch: Any) -> torch.Tensor:
        """A step that trains, traced."""
        if not hasattr(self, "_step"):
            self._step = cstorch.trace(self.train)
        return self._step(batch)

"""Training with dropout through real processes: the same on every number of wafers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_rig import RunningCluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.data import DataExecutor

STEPS = 4


def input_fn() -> DataLoader[Any]:
    rows = torch.randn(12 * STEPS, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), batch_size=12)


def losses(folder: Path, wafers: int) -> list[float]:
    config = cstorch.distributed.ClusterConfig(num_csx=wafers)
    cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.2))
    compiled = cstorch.compile(model)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = compiled(batch[0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    report = cstorch.step_closure(lambda loss: seen.append(loss.item()))
    for batch in DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=STEPS):
        report(step(batch))
    cstorch.close_backend()
    return seen


@pytest.mark.cluster
def test_dropout_is_the_same_on_one_wafer_and_on_two(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    one, two = (losses(tmp_path / str(wafers), wafers) for wafers in (1, 2))
    assert len(set(one)) == STEPS
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)

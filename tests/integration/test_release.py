"""A backend that returns its nodes between two executions: others can have them, and the results stay the same."""

import copy
from pathlib import Path

import pytest
import torch
from cluster_rig import RunningCluster, wait_for
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cstorch.errors import UsageError

pytestmark = pytest.mark.cluster

STEPS = 4


def input_fn() -> DataLoader:
    rows = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)


def train(cluster: RunningCluster, folder: Path, *, releases: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, leaves a loop, evaluates, and trains again; returns the losses, and the weights at the end."""
    config = cstorch.distributed.ClusterConfig(
        num_csx=2, mgmt_address=cluster.management, changes_need_checkpoint=False
    )
    losses: list[float] = []
    with cstorch.backend("CSX", artifact_dir=folder, cluster_config=config) as backend:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.05)
        report = cstorch.step_closure(lambda loss: losses.append(loss.item()))

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            rows, wanted = batch
            loss = (compiled(rows) - wanted).pow(2).mean()
            if model.training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss

        def own_nodes() -> list[str]:
            job = cluster.jobs()[0].job
            return [node.member for node in cluster.nodes() if node.job == job]

        def loop(steps: int = STEPS) -> None:
            loader = cstorch.utils.data.DataLoader(input_fn)
            executor = cstorch.utils.data.DataExecutor(loader, num_steps=STEPS)
            for batch in executor:
                report(step(batch))
                if executor.user_iteration == steps:
                    if releases:
                        with pytest.raises(UsageError, match="inside the loop"):
                            backend.release()
                    if steps < STEPS:
                        break
            assert len([member for member in own_nodes() if member.startswith("wafer")]) == 2
            if releases:
                backend.release()
                wait_for(lambda: not own_nodes())
                backend.release()  # there is nothing to return

        loop()
        loop(steps=2)
        model.eval()
        loop()
        model.train()
        loop()
        weights = copy.deepcopy({name: value.to("cpu") for name, value in model.state_dict().items()})
    assert cstorch.current_backend(raise_exception=False) is None
    wait_for(lambda: not own_nodes())
    return losses, weights


def test_a_job_that_was_released_continues_as_if_it_had_not(cluster: RunningCluster, tmp_path: Path) -> None:
    expected, expected_weights = train(cluster, tmp_path / "whole", releases=False)
    losses, weights = train(cluster, tmp_path / "released", releases=True)
    assert losses == expected
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())


def test_a_backend_of_the_cpu_has_nothing_to_return() -> None:
    with cstorch.backend("CPU") as backend:
        backend.release()
    with cstorch.backend("CPU") as other:
        assert other is not backend
        cstorch.close_backend()  # before the end of the block
    assert cstorch.current_backend(raise_exception=False) is None

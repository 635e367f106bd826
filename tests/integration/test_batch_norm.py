"""Batch norm on a cluster: SwarmX reduces in the middle of a step, and all wafers wait for it."""

from pathlib import Path

import parity
import pytest
import torch
from cluster_rig import RunningCluster
from test_exactness import assert_equal, options
from torch import nn
from torch.nn import functional as F


class Network(parity.Network):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(parity.HIDDEN), nn.BatchNorm1d(parity.HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.fc1(x)))
        return self.fc3(F.relu(self.norm2(self.fc2(x))))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("wafers", "shards", "lane"), [(1, 1, "shared_memory"), (2, 2, "grpc"), (4, 2, "shared_memory")]
)
def test_the_statistics_are_those_of_the_whole_batch(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wafers: int, shards: int, lane: str
) -> None:
    monkeypatch.setattr(parity, "Network", Network)
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    monkeypatch.setenv("WAFERBOX_LANE", lane)
    plain = parity.run_plain(options("plain", tmp_path, "sgd", "mean"))
    ours = parity.run_cstorch(options("CSX", tmp_path, "sgd", "mean", num_csx=wafers, shards=shards))
    assert_equal(ours, plain)

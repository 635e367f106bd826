"""Steps that mix samples, on a cluster: rows of all wafers are gathered, with a warning, or the step is refused."""

from pathlib import Path

import parity
import pytest
import torch
from cluster_rig import RunningCluster
from test_exactness import assert_equal, options

from cstorch.errors import CompileError


class Network(parity.Network):
    """Mixes each sample with another before and within the network."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(0.7 * x + 0.3 * x.flip(0)).relu()
        return self.fc3(self.fc2(x + x.roll(1, 0).detach()).relu())


@pytest.fixture(autouse=True)
def _mixing(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "Network", Network)
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


@pytest.mark.cluster
@pytest.mark.parametrize(("wafers", "shards"), [(1, 1), (2, 2)])
def test_training_is_that_of_the_whole_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wafers: int, shards: int
) -> None:
    plain = parity.run_plain(options("plain", tmp_path, "sgd", "mean"))
    ours = parity.run_cstorch(options("CSX", tmp_path, "sgd", "mean", num_csx=wafers, shards=shards))
    assert_equal(ours, plain)
    warnings = [record.message for record in caplog.records if record.message.startswith("Rows of the whole batch")]
    assert len(warnings) == (wafers > 1)
    for warning in warnings:
        for name in ("aten.flip", "aten.roll"):
            assert f"{name} acts on the dimension of the samples" in warning
        assert "test_mixed_samples_on_a_cluster.py:" in warning


@pytest.mark.cluster
def test_strict_sharding_refuses_such_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_STRICT_SHARDING", "1")
    with pytest.raises(CompileError, match=r"sharding is strict: .*test_mixed_samples_on_a_cluster.py:\d+.*aten.flip"):
        parity.run_cstorch(options("CSX", tmp_path, "sgd", "mean", num_csx=2))

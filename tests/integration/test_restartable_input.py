"""Input that goes on where a checkpoint was taken, though workers had run ahead; what workers know of themselves."""

import json
from pathlib import Path

import pytest
import restarted_input
from cluster_rig import RunningCluster

import cerebras.pytorch as cstorch

pytestmark = pytest.mark.cluster


@pytest.fixture
def on_cluster(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a script on the cluster."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


def test_input_goes_on_with_exactly_the_next_batch(on_cluster: None, tmp_path: Path) -> None:
    python_path = tmp_path / "modules"
    python_path.mkdir()
    (python_path / "only_on_workers.py").write_text("SCALE = 0.5\n")
    whole = restarted_input.train(tmp_path / "whole", python_path=python_path, num_steps=7, checkpoint_steps=3)
    cstorch.close_backend()
    checkpoint = tmp_path / "whole" / "checkpoint_3.mdl"
    assert cstorch.load(checkpoint)["input"] == {"samples": 24, "step": 3, "workers": 4}
    rest = restarted_input.train(
        tmp_path / "rest", python_path=python_path, num_steps=4, checkpoint_steps=4, load=checkpoint, more_steps=(1, 5)
    )
    assert rest[:4] == whole[3:]
    # The training goes on behind its own last batch after each evaluation, beyond the end of a pass.
    assert rest == pytest.approx(restarted_input.plain(13, scale=0.5)[3:], rel=1e-5)
    assert whole == pytest.approx(restarted_input.plain(7, scale=0.5), rel=1e-5)
    assert cstorch.load(tmp_path / "rest" / "checkpoint_4.mdl")["input"]["samples"] == 56

    told = {
        path.name: json.loads(path.read_text())
        for path in (tmp_path / "rest").iterdir()
        if path.name.startswith(("client", "worker"))
    }
    assert told["client"] == {"num_streamers": 0, "rows": 8, "role": "MASTER", "local_rank": 0}
    for rank in range(4):
        expected = {"num_streamers": 4, "rows": 4, "role": "WORKER", "local_rank": rank % 2}
        assert told[f"worker_{rank}"] == expected

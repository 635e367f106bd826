"""Labels that number the samples of a part, where the step works over those of all wafers."""

from pathlib import Path

import numbered_samples
import pytest
from cluster_rig import RunningCluster

import cerebras.pytorch as cstorch

pytestmark = pytest.mark.cluster


def test_parts_that_number_their_samples_alike_are_warned_of(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if "is the same on all 2 wafers" in record.message]

    losses = numbered_samples.train(tmp_path / "counted", counts_on=True)
    cstorch.close_backend()
    assert losses == pytest.approx(numbered_samples.plain(), rel=1e-5)
    assert warnings() == []
    other = numbered_samples.train(tmp_path / "numbered", counts_on=False)
    cstorch.close_backend()
    assert other != pytest.approx(losses, rel=1e-2)
    assert len(warnings()) == 1  # of the job, whatever its executions

"""Labels that number the samples of a part, where the step works over those of all wafers."""

from pathlib import Path

import numbered_samples
import pytest
from cluster_rig import RunningCluster

import cerebras.pytorch as cstorch
from cstorch.errors import CstorchWarning

pytestmark = pytest.mark.cluster


@pytest.mark.filterwarnings("error")
def test_parts_that_number_their_samples_alike_are_warned_of(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)

    losses = numbered_samples.train(tmp_path / "counted", counts_on=True)
    cstorch.close_backend()
    assert losses == pytest.approx(numbered_samples.plain(), rel=1e-5)
    with pytest.warns(CstorchWarning) as caught:
        other = numbered_samples.train(tmp_path / "numbered", counts_on=False)
    cstorch.close_backend()
    assert other != pytest.approx(losses, rel=1e-2)
    # Of the job once, whatever its executions.
    assert ["is the same on all 2 wafers" in str(warning.message) for warning in caught] == [True]

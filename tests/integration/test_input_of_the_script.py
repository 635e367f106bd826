"""The input_fn runs in processes of workers: what it reads of the script is there too, or is warned of."""

import warnings
from pathlib import Path

import pytest
import scaled_input
import torch
from cluster_rig import RunningCluster

from cstorch.errors import CstorchWarning

pytestmark = pytest.mark.cluster

SUM = sum(range(scaled_input.ROWS * scaled_input.FEATURES))


@pytest.fixture(autouse=True)
def on_the_cluster(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


def first_batch_warnings(folder: Path, *arguments: float, num_csx: int = 1, executions: int = 1) -> tuple[float, int]:
    """The first sum, and the number of warnings of the first batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CstorchWarning)
        sums = scaled_input.train(folder, *arguments, num_csx=num_csx, executions=executions)
    texts = [str(warning.message) for warning in caught]
    found = [text for text in texts if "is not the one that it makes in the script" in text]
    assert all("scaled_input.py:" in text for text in found)
    return sums[0], len(found)


@pytest.mark.parametrize("num_csx", [1, 2])
def test_a_variable_that_the_script_sets_in_a_module_is_warned_of(
    num_csx: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_batch_warnings(tmp_path, num_csx=num_csx) == (SUM, 0)
    monkeypatch.setattr(scaled_input, "SCALE", 2.0)
    assert first_batch_warnings(tmp_path, num_csx=num_csx, executions=2) == (SUM, 1)  # of the job once
    assert first_batch_warnings(tmp_path, scaled_input.SCALE, num_csx=num_csx) == (2 * SUM, 0)


def test_a_variable_of_the_environment_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSET", "1")
    assert first_batch_warnings(tmp_path) == (SUM, 1)


def test_the_default_type_is_that_of_the_script(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert first_batch_warnings(tmp_path) == (SUM, 0)
    finally:
        torch.set_default_dtype(torch.float32)

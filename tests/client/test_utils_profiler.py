"""What `executor.profiler` measures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import cerebras_pytorch as released
import cstorch
from cstorch.utils.profiler import Activity, Profiler


class LargestBatch(Activity):
    def __init__(self) -> None:
        self.largest = 0

    def update(self, batch_size: int) -> None:
        self.largest = max(self.largest, batch_size)

    def compute(self) -> int:
        return self.largest


def batches() -> list[torch.Tensor]:
    return [torch.ones(4, 2), torch.ones(8, 2), torch.ones(2, 2)]


def test_an_executor_measures_what_it_is_given(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    loader = cstorch.utils.data.DataLoader(batches)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=3, profiler_activities=[LargestBatch])
    assert executor.profiler.rate_tracker.total_samples == 0  # scripts ask for it also where the loop never began
    rates = []
    for _ in executor:
        rates.append((executor.profiler.rate_tracker.rate, executor.profiler.rate_tracker.global_rate))
    tracker = executor.profiler.rate_tracker
    assert tracker.total_samples == 14
    assert all(rate > 0 and global_rate > 0 for rate, global_rate in rates)
    assert tracker.samples_per_sec == pytest.approx(14 / tracker.total_time, rel=0.2)
    assert executor.profiler.global_rate() > 0
    assert executor.profiler.LargestBatch.largest == 8
    with pytest.raises(AttributeError, match="no activity 'SmallestBatch'"):
        _ = executor.profiler.SmallestBatch
    results = json.loads((executor.artifact_dir / "profile.json").read_text())
    assert results["LargestBatch"] == 8
    assert results["rate_tracker"]["total_samples"] == 14


def test_release_2_0_has_two_names_for_the_activities(tmp_path: Path) -> None:
    released.backend("CPU", artifact_dir=tmp_path)
    loader = released.utils.data.DataLoader(batches)
    for name in ("profiler_activities", "additional_activities"):
        settings: dict[str, Any] = {name: [LargestBatch]}
        executor = released.utils.data.DataExecutor(loader, num_steps=1, **settings)
        assert len(list(executor)) == 1
        assert executor.profiler.LargestBatch.compute() == 4


def test_what_is_no_class_of_activity_is_refused(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    wrongs: list[Any] = [LargestBatch(), int, "rate"]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="profiler_activities"):
            cstorch.utils.data.DataExecutor(
                cstorch.utils.data.DataLoader(batches), num_steps=1, profiler_activities=[wrong]
            )


def test_a_profiler_alone(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, [LargestBatch])
    profiler.step(3)
    profiler.rate_tracker.reset_time()
    assert profiler.rate() >= 0
    assert profiler.rate_tracker.flops_utilization is None
    profiler.write()
    assert json.loads((tmp_path / "profile.json").read_text())["LargestBatch"] == 3


def test_measurements_that_cannot_be_written_replace_no_error_of_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=3)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - of the loop's body
        for _ in executor:
            shutil.rmtree(executor.artifact_dir)
            raise ZeroDivisionError
    assert "The rates of the execution are not in" in caplog.text

"""The stages and layers of a compile, as those who wait for it are shown them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from torch import nn

from appliance.compiler.artifacts import Artifacts
from appliance.compiler.core.progress import Progress, progress, progress_shown
from appliance.compiler.pipeline import PASSES, STAGES, Target
from waferbox import settings


def two_layers() -> str:
    def build(model: Any) -> Any:
        return lambda x: model(x).sum()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return Traced(build, model, torch.randn(4, 8, dtype=torch.float64)).text


def test_the_stages_of_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path / "root"))
    found: list[Progress] = []
    with progress_shown(found.append):
        Artifacts(tmp_path, tmp_path).compile(two_layers(), Target(num_csx=2, num_shards=2))
    stages = [stage for stage, _ in itertools.groupby(found, lambda each: each.stage)]
    assert stages == [
        "reading the step",
        *(f"running the pass {step.name}" for step in PASSES),
        "placing the values on the wafers",
        "dividing the work between the wafers and MemoryX",
        "making the wafer's kernels",
        "measuring the wafer's kernels",
        "scheduling the wafer",
        "planning the wafer's memory",
        *(f"scheduling shard {number} of 2 of MemoryX" for number in (1, 2)),
        *(f"writing the stage {name} to the artifact" for name in STAGES),
        "writing the report",
    ]
    layers = [(each.done, each.of) for each in found if each.of]
    assert len(layers) > 1
    assert layers == [(number, len(layers)) for number in range(len(layers))]


def test_a_line_counts_layers() -> None:
    counted = Progress(stage="making the wafer's kernels", done=1200, of=9600)
    assert str(counted) == "making the wafer's kernels, layer 1,200 of 9,600"
    assert str(Progress(stage="reading the step")) == "reading the step"


def test_progress_goes_to_the_innermost_context() -> None:
    outer: list[Progress] = []
    inner: list[Progress] = []
    with progress_shown(outer.append):
        with progress_shown(inner.append):
            progress("a")
        progress("b")
    progress("c")
    assert [each.stage for each in inner] == ["a"]
    assert [each.stage for each in outer] == ["b"]

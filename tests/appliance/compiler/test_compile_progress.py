"""The stages and layers of a compile, as those who wait for it are shown them."""

import itertools
from pathlib import Path

import pytest

from appliance.compiler.artifacts import Artifacts
from appliance.compiler.core.progress import Progress, progress, progress_shown
from appliance.compiler.pipeline import PASSES, STAGES, Target
from waferbox import settings

TEXT = """module {
  func @graph(%x: tensor<4x8xf32> {cs.input_name = "input_0"},
              %w: tensor<3x8xf32> {tf.aliasing_output = 1 : i64, tf.resource_name = "w"})
      -> (tensor<3xf32> {cs.output_name = "y"}, tensor<3x8xf32>) {
    %p = cirh.Const dense<[1, 0]> : tensor<2xi64>
    %t = cirh.Transpose %w, %p : (tensor<3x8xf32>, tensor<2xi64>) -> tensor<8x3xf32>
    %m = cirh.MatMul %x, %t : (tensor<4x8xf32>, tensor<8x3xf32>) -> tensor<4x3xf32>
    %y = cirh.Reduce %m {dimensions = dense<[0]> : tensor<1xi64>, reduce_kind = "ADD"}
        : (tensor<4x3xf32>) -> tensor<3xf32>
    %v = cirh.Add %w, %w : tensor<3x8xf32>
    return %y, %v : tensor<3xf32>, tensor<3x8xf32>
  }
}
"""


def test_the_stages_of_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path / "root"))
    found: list[Progress] = []
    with progress_shown(found.append):
        Artifacts(tmp_path, tmp_path).compile(TEXT, Target(num_csx=2, num_shards=2))
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

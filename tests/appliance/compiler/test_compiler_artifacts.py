"""What a compile leaves in the artifact folder: the plan, and the module after each pass and stage."""

from pathlib import Path

import pytest

from appliance.compiler.artifacts import Artifacts
from appliance.compiler.pipeline import PASSES, STAGES, Target, compile_module
from waferbox import settings
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from waferbox.host.folders import cache_root

TARGET = Target(num_csx=2, num_shards=1)
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


@pytest.fixture(autouse=True)
def _own_cache_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path_factory.mktemp("root")))


def test_the_module_is_kept_after_each_pass_that_changed_it_and_each_stage(tmp_path: Path) -> None:
    key, _, cached = Artifacts(tmp_path, cache_root()).compile(TEXT, TARGET)
    assert not cached
    names = [*(step.name for step in PASSES), *STAGES]
    files = sorted((tmp_path / key).glob("*.mlir"))
    kept = [path.stem.split("-", 1) for path in files]
    assert [name for _, name in kept] == ["canonicalise", "dce", *STAGES]
    assert all(names[int(number) - 1] == name for number, name in kept)
    for path in files:
        if path.stem.endswith(("lair", "kernels")):  # many modules, or another language
            continue
        module = parse_module(path.read_text())
        verify(module)
        assert print_module(module) == path.read_text()
    # Nothing else is left, such as half a file.
    assert sorted(path.name for path in tmp_path.iterdir()) == [key, f"{key}.plan"]


def test_what_is_cached_is_not_written_again(tmp_path: Path) -> None:
    cache = Artifacts(tmp_path, cache_root())
    key, plan, _ = cache.compile(TEXT, TARGET)
    for path in (tmp_path / key).iterdir():
        path.unlink()
    again, same, cached = cache.compile(TEXT, TARGET)
    assert (again, cached) == (key, True)
    assert same == plan
    assert not list((tmp_path / key).iterdir())


def test_keeping_texts_does_not_change_the_plan(tmp_path: Path) -> None:
    _, plan, _ = Artifacts(tmp_path, cache_root()).compile(TEXT, TARGET)
    assert compile_module(TEXT, TARGET) == plan


def test_a_file_where_the_folder_should_be_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_text("")
    _, _, cached = Artifacts(file, cache_root()).compile(TEXT, TARGET)
    assert not cached

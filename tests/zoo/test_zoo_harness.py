"""The driver of `make zoo-test`, with a small checkout of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import pytest
import yaml
from zoo_compiles import MARK, Meter, compile_at_full_size, configurations
from zoo_cuts import cut, inputs
from zoo_models import Model, models, release
from zoo_results import row
from zoo_runs import Result, run
from zoo_samples import Samples

CONFIGURATION: dict[str, dict[str, Any]] = {
    "train_input": {"data_processor": "GptHDF5DataProcessor", "data_dir": "somewhere", "batch_size": 512},
    "model": {"hidden_size": 4096, "num_hidden_layers": 96, "vocab_size": 50257, "dropout_rate": 0.1},
    "runconfig": {"num_epochs": 3, "seed": 1},
}
PRINTS_LOSSES = """
    import sys, yaml
    from pathlib import Path
    parameters = yaml.safe_load(Path(sys.argv[sys.argv.index("--params") + 1]).read_text())
    assert list(Path(parameters["train_input"]["data_dir"]).glob("*.h5"))
    for step in range(1, parameters["runconfig"]["max_steps"] + 1):
        print(f"Step={step}, Loss={2.0 + 0.1 * (sys.argv[1] == 'CPU')}")
"""


def checkout(folder: Path, script: str, **configurations: dict[str, Any]) -> Path:
    for place in ("toy/pytorch", "toy/tf", "tools", "data_preparation"):
        (folder / "modelzoo-1.9.1/modelzoo" / place).mkdir(parents=True)
        (folder / "modelzoo-1.9.1/modelzoo" / place / "run.py").write_text(textwrap.dedent(script))
    toy = folder / "modelzoo-1.9.1/modelzoo/toy/pytorch"
    for each in (toy, toy.with_name("tf"), toy.parents[1] / "data_preparation"):
        (each / "configs").mkdir()
    for name, configuration in configurations.items():
        (toy / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(configuration))
    return folder / "modelzoo-1.9.1"


def result_of(folder: Path, script: str) -> Result:
    place = checkout(folder, script, small=CONFIGURATION)
    (model,) = models(place)
    return run(model, place, folder / "runs", limit=20)


def test_each_kind_of_data_of_a_model_is_found_once(tmp_path: Path) -> None:
    other = CONFIGURATION | {"train_input": {"data_processor": "Skm"}}
    place = checkout(tmp_path, "", b=CONFIGURATION, a=CONFIGURATION, c=other)
    toy = place / "modelzoo/toy/pytorch"
    assert release(place) == "1.9.1"
    assert list(models(place)) == [
        Model(name="toy", script=toy / "run.py", configuration=toy / "configs" / name) for name in ("a.yaml", "c.yaml")
    ]


def test_sizes_are_cut_and_small_ones_kept(tmp_path: Path) -> None:
    small = cut(CONFIGURATION, tmp_path, "CSX")
    assert small["model"] == {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "dropout_rate": 1e-9}
    assert small["train_input"]["batch_size"] == 4
    assert small["runconfig"]["max_steps"] == 3
    assert small["runconfig"]["seed"] == 1
    assert "num_epochs" not in small["runconfig"]
    assert [name for name, _ in inputs(small)] == ["train_input"]
    assert cut({"model": {"hidden_size": 8, "num_heads": 2}}, tmp_path, "CSX")["model"] == {
        "hidden_size": 8,
        "num_heads": 2,
    }


def test_images_are_a_few_patches_large(tmp_path: Path) -> None:
    section = {"patch_size": [14, 14], "image_size": [336, 336]}
    assert cut({"model": section}, tmp_path, "CSX")["model"]["image_size"] == [28, 28]
    section = {"image_shape": [256, 512, 3], "encoder_filters": [32, 64]}
    small = cut({"model": section}, tmp_path, "CSX")["model"]
    assert small == {"image_shape": [64, 64, 3], "encoder_filters": [16, 16]}


def test_losses_are_compared_with_those_of_the_cpu(tmp_path: Path) -> None:
    result = result_of(tmp_path, PRINTS_LOSSES)
    assert not result.reason
    assert row(result) == ("toy", "small.yaml", "2, 2, 2", "4.8 %")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise ImportError('no such package')", "ImportError: no such package"),
        (
            "try: raise ValueError('too large')\nfinally: raise RuntimeError('Encountered error when calling on_end')",
            "ValueError: too large",
        ),
        ("print('Step=1, Loss=1.0')", "the steps with a loss are 1"),
        ("for step in (1, 2, 3): print(f'Step={step}, Loss=nan')", "the losses are nan, nan, nan"),
    ],
)
def test_a_model_that_does_not_train_has_a_reason(tmp_path: Path, script: str, reason: str) -> None:
    result = result_of(tmp_path, script)
    assert result.reason == reason
    assert row(result) == ("toy", "small.yaml", "", f"{reason}, also on the CPU")


@pytest.mark.parametrize(
    ("processor", "shapes"),
    [
        ("LlavaHDF5MapDataProcessor", {"data": (32, 4, 32), "img_path": (32, 1)}),
        (
            "MultimodalSimpleHDF5MapDataProcessor",
            {"data": (32, 5, 32), "img_path": (32, 1), "img_data_loc": (32, 4)},
        ),
        ("BertHDF5DataProcessor", {"data": (32, 2, 32), "labels": (32, 1, 32)}),
    ],
)
def test_samples_have_the_rows_that_a_processor_of_release_2_10_reads(
    tmp_path: Path, processor: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    section = {"data_processor": processor, "data_dir": ""}
    Samples(tmp_path / "data", section, {"trainer": {}}).write()
    with h5py.File(tmp_path / "data/data-0.h5") as file:
        assert {name: data.shape for name, data in file.items()} == shapes
        if "img_path" in file:
            assert not file["data"][:, 3].any()  # where the text is padded


@pytest.mark.parametrize("place_of_data", [{"data_dir": ""}, {"dataset": {"root": ""}}])
def test_data_that_nothing_writes_is_a_reason(tmp_path: Path, place_of_data: dict[str, Any]) -> None:
    place = checkout(tmp_path, "", own={"train_input": {"data_processor": "Own", "batch_size": 1} | place_of_data})
    (model,) = models(place)
    assert run(model, place, tmp_path / "runs", limit=1).reason == "there is no synthetic data for Own"


COMPILES = """
    import os, sys, yaml
    from pathlib import Path
    assert sys.argv[1] == "fit" and sys.argv[3:] == ["--compile_only"] and "WAFERBOX_CACHE" in os.environ
    parameters = yaml.safe_load(Path(sys.argv[2]).read_text())["trainer"]
    assert set(parameters) == {"init", "fit"} and parameters["init"]["model"]["num_hidden_layers"] == 96
    import h5py
    for section in parameters["fit"].values():
        files = [h5py.File(path) for path in Path(section["data_dir"]).glob("*.h5")]
        assert sum(len(file["data"]) for file in files) >= 100 and files[0]["data"].shape[-1] == 2048
    sys.exit("MemoryError: " + sys.argv[1] if "bad" in sys.argv[2] else 0)
"""


def test_a_configuration_compiles_at_its_full_size(tmp_path: Path) -> None:
    section = {"data_processor": "GptHDF5MapDataProcessor", "data_dir": "", "batch_size": 100}
    model = CONFIGURATION["model"] | {"max_position_embeddings": 2048}
    trainer = {
        "init": {"model": model},
        "fit": {"train_dataloader": section, "val_dataloader": section},
        "validate": {},
    }
    place = tmp_path / "modelzoo-2.10.0"
    package = place / "src/cerebras/modelzoo"
    for folder in (package / "cli", package / "models/toy/configs/large"):
        folder.mkdir(parents=True)
    (package / "cli/main.py").write_text(textwrap.dedent(COMPILES))
    (package / "models/toy/configs/large/all.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    (path,) = configurations(place)

    assert not compile_at_full_size(path, place, tmp_path / "good", limit=60).reason
    assert compile_at_full_size(path, place, tmp_path / "bad", limit=60).reason == "MemoryError: fit"


def test_memory_and_processor_of_marked_processes_are_measured(tmp_path: Path) -> None:
    meter = Meter(str(tmp_path))
    script = "import os; block = os.urandom(200_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {MARK: meter.mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        meter.read()
        process.communicate(b"\n")
    assert 0.2e9 < meter.memory < 0.3e9
    assert list(meter.processor) == [process.pid]
    assert 0 < meter.processor[process.pid] < 60

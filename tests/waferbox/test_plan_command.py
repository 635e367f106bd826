"""`waferbox plan`: a small step on many wafers, and what it refuses."""

import json
import re
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from appliance.compiler.artifacts import Artifacts
from appliance.compiler.core.target import Target
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.commands.cli import app
from waferbox.execution_folders import CIRH, RECORD, ExecutionRecord, Stage
from waferbox.prediction import quantities
from wsc.v1 import management_pb2

RATES = ("--wafer-rate", "1Gflop/s", "--link", "1Gb/s")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A product of a batch of eight rows with a weight."""
    builder = GraphBuilder()
    weight = builder.argument(tensor_type((600, 400), torch.float32), state="state.weight")
    batch = builder.argument(tensor_type((8, 600), torch.float32), input="input_0")
    (product,) = builder.op("cirh.MatMul", [batch, weight])
    path = tmp_path / "step.mlir"
    path.write_text(print_module(builder.finish([(product, "output_0")])))
    return path


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A product of a batch of eight rows with a weight, from which its gradient is subtracted."""
    builder = GraphBuilder()
    weight = builder.argument(tensor_type((600, 400), torch.float32), state="state.weight")
    batch = builder.argument(tensor_type((8, 600), torch.float32), input="input_0")
    (product,) = builder.op("cirh.MatMul", [batch, weight])
    (gradient,) = builder.op("cirh.MatMul", [batch, product], {"transpose_a": True})
    (following,) = builder.op("cirh.Sub", [weight, gradient])
    path = tmp_path / "training.mlir"
    path.write_text(print_module(builder.finish([(following, None)], {0: 0})))
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def test_a_thousand_wafers(step: Path) -> None:
    result = call(step, *RATES, "--wafers", "1024", "--divided-over", "2")
    assert result.exit_code == 0, result.output
    assert "fan-out" in result.output
    assert "Limited by: SwarmX's link, out" in result.output


def test_no_option_is_needed(step: Path) -> None:
    result = call(step)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("CS-3 (public figures: 44 GB")
    assert "Each wafer has 8 rows" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines() if "SwarmX" in line] == ["16", "1,024"]


@pytest.mark.parametrize("wafers", ["64", "1,16,1024"])
def test_a_page(step: Path, tmp_path: Path, wafers: str) -> None:
    data = json.loads(call(step, "--wafers", wafers, "--json").stdout)
    file = tmp_path / "page.html"
    result = call(step, "--wafers", wafers, "--html", file)
    assert result.stdout == f"The prediction is in {file}\n"
    page = file.read_text()
    written = re.search(r'<script type="application/json" id="prediction">(.*)</script>', page, re.DOTALL)
    assert written is not None
    assert json.loads(written[1]) == data
    assert page.count("<script") == 1
    assert not re.search(r"https?:|url\(|@import|(src|href)=", page)
    shown = data["predictions"] if "predictions" in data else data["tried"]
    for each in shown:
        assert f'data-value="{each["step_seconds"]}"' in page
        assert f'data-value="{each["rows_per_second"]}"' in page
    shown_text = unescape(page.partition("<script")[0])
    for load in shown[0]["loads"]:
        assert f'<th scope="row">{load["name"]}</th>' in shown_text
    assert "Each wafer has 8 rows" in page


def test_a_page_that_cannot_be_written(step: Path, tmp_path: Path) -> None:
    result = call(step, "--wafers", "1", "--html", tmp_path / "absent" / "page.html")
    assert result.exit_code == 2  # before the work for it
    assert "cannot be written" in result.stderr


def test_of_many_executions_the_last_ones_are_named(tmp_path: Path) -> None:
    for number in range(1, 9):
        execution(tmp_path / f"{number:06}", "module")
    told = " ".join(call(tmp_path, "--execution", "9").stderr.split())
    assert "it has 4 earlier ones; execution 5, train" in told
    assert "; execution 8, train" in told


def test_machines(step: Path) -> None:
    seconds = [
        json.loads(call(step, "--machine", name, "--wafers", "1", "--wafer-rate", "1Gflop/s", "--json").stdout)
        for name in ("cs2", "cs3")
    ]
    assert [each["machine"] for each in seconds] == ["CS-2", "CS-3"]
    assert seconds[0]["best"]["step_seconds"] == pytest.approx(seconds[1]["best"]["step_seconds"], rel=1e-3)


def execution(folder: Path, text: str, **fields: Any) -> Path:
    """Makes the folder of an execution whose step has this text."""
    folder.mkdir(parents=True)
    (folder / CIRH).write_text(text)
    told: dict[str, Any] = {"stage": Stage.TRAIN, "function": "f (a.py:1)", "model": "M", "loader": "data"}
    told |= {"steps": 9, "rows": 8, "num_csx": 1}
    (folder / RECORD).write_text(ExecutionRecord(**(told | fields)).text())
    return folder


def test_the_last_execution_that_trains_is_taken(step: Path, training: Path, tmp_path: Path) -> None:
    root = tmp_path / "model" / "cerebras_logs" / "20261126"
    execution(root / "executors" / "000001", training.read_text(), half="bfloat16", num_csx=2)
    execution(root / "executors" / "000002", step.read_text(), stage=Stage.EVAL, model="")
    (root / "executors" / "latest").symlink_to("000002")
    (root.parent / "latest").symlink_to(root.name)
    for folder in (root, root / "executors", root.parent, tmp_path / "model"):
        result = call(folder, "--wafers", "1")
        assert result.exit_code == 0, result.output
        told = " ".join(result.stderr.split())
        assert told.startswith("Execution 1, train: f (a.py:1) of M in bfloat16, 9 steps of 8 rows from data"), told
        assert "not execution 2, eval: f (a.py:1), 9 steps" in told
        assert "Each wafer has 4 rows" in result.stdout  # as the script divides them
    for wanted in ("2", "eval"):
        assert call(root, "--wafers", "1", "--execution", wanted).stderr.startswith("Execution 2, eval")
    assert call(root / "executors" / "latest", "--wafers", "1").stderr.startswith("Execution 2, eval")
    result = call(root, "--execution", "3")
    assert result.exit_code == 2
    assert "has no execution '3'" in result.stderr


def test_a_plan_is_not_made_again(training: Path, tmp_path: Path) -> None:
    text = training.read_text()
    artifacts = Artifacts(tmp_path / "plans", tmp_path / "root")
    name, plan, _ = artifacts.compile(text, Target(num_csx=2, num_shards=1), None)
    file = tmp_path / "plans" / f"{name}.plan"
    folder = execution(tmp_path / "executors" / "000001", "no step", plan=str(file), num_csx=2)
    told = [call(where, "--wafers", "4", "--json") for where in (folder, file, file.with_suffix(""), file.parent)]
    predicted = [json.loads(each.stdout)["best"] for each in told]
    assert predicted[1:] == predicted[:-1]
    assert predicted[0]["rows_per_second"] == pytest.approx(16 / predicted[0]["step_seconds"])
    assert plan.num_csx == 2
    refused = call(file, "--wafers", "4", "--half", "bfloat16")
    assert refused.exit_code == 1
    assert "name the artifact folder" in " ".join(refused.stderr.split())
    assert call("").exit_code == 2
    ignored = call(file, "--execution", "1")
    assert ignored.exit_code == 2
    assert "--execution names an execution in an artifact folder" in " ".join(ignored.stderr.split())
    (folder / CIRH).write_text(text)
    assert call(folder, "--wafers", "4", "--half", "bfloat16").exit_code == 0


def test_the_plan_of_a_job_that_trains_is_taken(
    step: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = Artifacts(tmp_path / "plans", tmp_path / "root")
    names = [artifacts.compile(file.read_text(), Target(num_csx=1, num_shards=1))[0] for file in (training, step)]
    job = management_pb2.JobInfo(job="job-47c96e93", artifacts=[str(tmp_path / "plans" / name) for name in names])
    other = management_pb2.JobInfo(job="job-11111111")
    by_name = {each.job: each for each in (job, other)}
    cluster = SimpleNamespace(jobs=lambda: [job, other], job=by_name.__getitem__, answering=nullcontext)
    monkeypatch.setattr("waferbox.commands.step_source.connect", lambda management: nullcontext(cluster))
    result = call("47c", "--wafers", "1", "--json")
    assert result.exit_code == 0, result.output
    assert f"job-47c96e93: {names[0]} is taken, with the most gradients of 2 plans" in " ".join(result.stderr.split())
    assert names[0] in json.loads(result.stdout)["step"]
    assert "it has compiled none yet" in " ".join(call("11", "--wafers", "1").stderr.split())
    assert call("22").exit_code == 3


def test_an_argument_that_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for argument, text in (
        (tmp_path / "nothing.mlir", "there is no file or folder"),
        ("model_dri", "there is no file or folder model_dri"),
        (tmp_path / "train.py", "is a script: run it, then name an artifact folder"),
    ):
        result = call(argument)
        assert result.exit_code == 2
        assert text in " ".join(result.stderr.split())
    result = call(tmp_path)
    assert result.exit_code == 1
    assert "is no artifact" in " ".join(result.stderr.split())


def test_json_has_the_rates_to_be_expected(step: Path) -> None:
    result = call(step, *RATES, "--wafers", "2", "--divided-over", "2", "--memoryx-rate", "200GB/s", "--json")
    told = json.loads(result.stdout)
    assert told["machine"] == "CS-3"
    single = told["single"]
    # 0.96 MB at 125 MB/s are 7.68 ms; a wafer's part is 4 rows: 1.92 Mflop are 1.92 ms.
    shares = {load["name"]: load["share"] for load in single["loads"]}
    assert shares["MemoryX's link, out"] * single["step_seconds"] == pytest.approx(7.68e-3)
    assert shares["wafer compute"] * single["step_seconds"] == pytest.approx(1.92e-3)
    assert told["best"]["rows_per_second"] == pytest.approx(8 / told["best"]["step_seconds"])
    assert told["efficiency"] == pytest.approx(told["best"]["rows_per_second"] / 2 / single["rows_per_second"])


def test_gradients_in_half_are_half_as_many_bytes(training: Path) -> None:
    seconds = []
    for options in ((), ("--half-gradients",)):
        result = call(
            training, *RATES, "--wafers", "2", "--divided-over", "2", "--half", "bfloat16", "--json", *options
        )
        assert result.exit_code == 0, result.output
        best = json.loads(result.stdout)["best"]
        seconds.append({load["name"]: load["share"] * best["step_seconds"] for load in best["loads"]})
    for link, share in (("a wafer's link, out", 0.5), ("MemoryX's link, in", 0.5), ("SwarmX's link, in", 0.6)):
        assert seconds[1][link] == pytest.approx(share * seconds[0][link], rel=0.01), link


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--divided-over", "3"), 1, "--divided-over"),
        (("--link", "100"), 2, "a unit is missing"),
        (("--link", "100Gbit/s"), 2, "100Gb/s"),
        (("--link", "0Gb/s"), 2, "more than zero"),
        (("--wafer-rate", "3GB/s"), 2, "312Tflop/s"),
        (("--latency", "-1us"), 2, "20us"),
        (("--half", "float8"), 1, "bfloat16"),
        (("--half-gradients", "--json"), 1, "without --half"),
        (("--half=cbfloat16", "--half-gradients"), 1, "cbfloat16 is emulated"),
        (("--wafers", "0"), 2, "--wafers"),
        (("--wafers", "1,many"), 2, "--wafers"),
        (("--machine", "cs1"), 2, "cs3"),
        (("--wafer-memory", "1kB"), 1, "step.mlir"),
    ],
)
def test_what_it_refuses(step: Path, arguments: tuple[str, str], status: int, message: str) -> None:
    result = call(step, *RATES, *arguments)
    assert result.exit_code == status
    assert message in result.stderr.replace("\n", "")


def test_a_file_that_is_no_module(step: Path) -> None:
    step.write_text("nothing")
    result = call(step, *RATES)
    assert result.exit_code == 1
    assert "step.mlir" in result.stderr


def test_quantities() -> None:
    assert quantities.bytes_per_second("100Gb/s") == 12.5e9
    assert quantities.bytes_per_second("10 GB/s") == 1e10
    assert quantities.flops_per_second("1.5Pflop/s") == 1.5e15
    assert quantities.seconds("20us") == pytest.approx(20e-6)
    assert quantities.seconds("0s") == 0
    assert quantities.size_bytes("40GB") == 40_000_000_000

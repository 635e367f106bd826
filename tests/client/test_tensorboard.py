"""Summaries: what is written is what TensorBoard reads, step by step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster, State
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import cerebras_pytorch as released
import cerebras_pytorch.experimental as experimental
import cstorch
import waferbox
from cerebras_torch.core import cb_model
from cstorch.errors import ConfigurationError, TraceError
from cstorch.utils.tensorboard import SummaryReader, SummaryWriter


def batches() -> list[torch.Tensor]:
    return [torch.ones(4, 2), torch.full((4, 2), 3.0)]


def count(state: State, step: int) -> dict[str, torch.Tensor]:
    return {"output_scalar": torch.tensor(float(step)), "output_tensor": torch.tensor([float(step), 0.5])}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(count)


def in_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    """As TensorBoard itself loads a run."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_scalars_written_in_step_closures(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    writer = cstorch.utils.tensorboard.SummaryWriter(tmp_path / "run")
    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=3)

    @cstorch.step_closure
    def report(mean: torch.Tensor) -> None:
        writer.add_scalar("train/mean", mean, executor.user_iteration)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch.mean()

    for batch in executor:
        report(step(batch))
    writer.close()
    assert in_tensorboard(tmp_path / "run", "train/mean") == [(1, 1.0), (2, 3.0), (3, 1.0)]


def test_summaries_of_the_traced_step_in_releases_1_9_to_2_1(cluster: FakeCluster, tmp_path: Path) -> None:
    released.backend("CSX", artifact_dir=tmp_path)
    compiled = released.compile(nn.Linear(2, 2))
    writer = released.utils.tensorboard.SummaryWriter(log_dir=str(tmp_path / "run"), base_step=101)
    config = released.utils.CSConfig(mgmt_address=cluster.address)
    loader = released.utils.data.DataLoader(batches)

    @released.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def step(batch: torch.Tensor) -> None:
        outputs = compiled(batch)
        released.summarize_scalar("loss", outputs.mean())
        released.summarize_tensor("layer/outputs", outputs[0])
        with pytest.raises(TraceError):
            writer.add_tensor("too early", outputs, 1)

    for batch in released.utils.data.DataExecutor(loader, num_steps=3, cs_config=config, writer=writer):
        step(batch)
    writer.close()
    assert in_tensorboard(tmp_path / "run", "loss") == [(101, 1.0), (102, 2.0), (103, 3.0)]
    reader = SummaryReader(str(tmp_path))
    assert reader.tensor_names() == {"layer/outputs"}
    kept: Any = reader.read_tensor("layer/outputs")
    assert [(found.step, found.tensor.tolist()) for found in kept] == [(100 + n, [n, 0.5]) for n in (1, 2, 3)]


def test_summaries_of_release_1_8_and_of_cb_model(tmp_path: Path) -> None:
    experimental.configure(model_dir=tmp_path)
    experimental.compile(nn.Linear(1, 1), backend="cpu")
    writer = SummaryWriter(tmp_path / "run")

    @experimental.compile_step
    def step(batch: torch.Tensor) -> None:
        experimental.scalar_summary("mean", batch.mean())

    @experimental.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def write(number: int) -> None:
        experimental.save_summaries(writer, number)

    for number, batch in enumerate(experimental.utils.data.DataLoader(batches, num_steps=2)):
        step(batch)
        write(number)
    cb_model.write_to_summary(writer, 7, dict_to_write={"rate": 0.5, "time": torch.tensor(2.0)})
    cb_model.write_to_summary(None, 8, dict_to_write={"rate": 0.25})
    writer.close()
    assert in_tensorboard(tmp_path / "run", "mean") == [(0, 1.0), (1, 3.0)]
    assert in_tensorboard(tmp_path / "run", "rate") == [(7, 0.5)]
    assert in_tensorboard(tmp_path / "run", "time") == [(7, 2.0)]


def test_the_reader_finds_all_runs_by_name_and_step(tmp_path: Path) -> None:
    for run, offset in (("a", 0), ("b/deeper", 10)):
        with SummaryWriter(tmp_path / run) as writer:
            for step in (2, 1):
                writer.add_scalar("train/loss", step + offset, step)
                writer.add_tensor("weight", torch.tensor([step + offset]), step)
            writer.add_text("notes", f"run {run}", 1)
    reader = SummaryReader(str(tmp_path))
    assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == [(1, 1), (1, 11), (2, 2), (2, 12)]
    assert [event.value for event in reader.read_scalar("train/loss", step=2)] == [2, 12]
    assert (reader.scalar_names(), reader.scalar_groups()) == ({"train/loss"}, {"train"})
    assert reader.text_summary_names() == ["notes"]
    texts = reader.read_text_summary("notes", step=1)
    assert [event.tensor_proto.string_val[0] for event in texts] == [b"run a", b"run b/deeper"]
    assert SummaryReader(str(tmp_path), filter="b/*").Scalars("train/loss")[0].value == 11
    with pytest.raises(KeyError, match="there is: train/loss"):
        reader.read_scalar("loss")

    one = SummaryReader(str(tmp_path / "a"))
    latest: Any = one.read_tensor("weight", step=2)
    assert (latest.step, latest.tensor.tolist()) == (2, [2])
    assert one.read_tensor("weight", step=3) is None
    assert one.read_tensor("weight", step=3, latest_only=False) == []
    both: Any = reader.read_tensor("weight", latest_only=False)
    assert {step: [found.tensor.item() for found in of_step] for step, of_step in both.items()} == {
        1: [1, 11],
        2: [2, 12],
    }
    with SummaryWriter(tmp_path / "a") as writer:
        writer.add_scalar("train/loss", 3.0, 3)
    one.reload()
    assert one.read_scalar("train/loss", step=3)[0].value == 3.0


def test_tensors_lie_where_the_real_system_puts_them(tmp_path: Path) -> None:
    value = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with SummaryWriter(tmp_path) as writer:
        writer.add_tensor("layer.1/weight", value, 5)
    (folder,) = tmp_path.glob("events.out.csevents.*")
    assert json.loads((folder / "metadata.json").read_text())["waferbox"] == waferbox.__version__
    (file,) = (folder / "tensors" / "layer.1" / "weight").iterdir()
    assert file.name.startswith("5.")
    assert torch.equal(torch.load(file), value)


@pytest.mark.parametrize(("name", "step"), [("../out", 1), ("/out", 1), ("", 1), ("a/../../out", 1), ("fine", -1)])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str, step: int) -> None:
    with SummaryWriter(tmp_path / "run") as writer, pytest.raises(ConfigurationError, match="of a summary"):
        writer.add_tensor(name, torch.ones(1), step)
    with pytest.raises(ConfigurationError, match="no folder"):
        SummaryReader(str(tmp_path / "nothing"))


@pytest.mark.cluster
def test_tensorboard_is_imported_only_when_it_is_asked_for() -> None:
    code = """
import sys
import cerebras.pytorch as cstorch, cerebras_torch.core.cb_model, cerebras_pytorch.experimental
assert not any(name.partition(".")[0] == "tensorboard" for name in sys.modules)
from cerebras_pytorch.experimental.utils.tensorboard import SummaryWriter
from cerebras.pytorch.utils import tensorboard
assert tensorboard.SummaryWriter is SummaryWriter is cstorch.utils.tensorboard.SummaryWriter
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

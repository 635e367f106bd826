"""cerebras_pytorch.experimental, releases 1.8 and 1.9, on the CPU and on a cluster that is a fake."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster, State
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cerebras_pytorch.experimental as cstorch
import cstorch as newest
from cerebras_pytorch.experimental import configuration
from cstorch import backends
from cstorch.backend import close_backend
from cstorch.errors import ConfigurationError, StateError, UsageError


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_configuration", None)


def input_fn(rows: int = 12, batch_size: int = 4) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(2.0 * rows).reshape(rows, 2)), batch_size=batch_size)


def loader(**settings: Any) -> Any:
    return cstorch.utils.data.DataLoader(input_fn, **settings)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 3),
        ({"num_steps": 7}, 7),
        ({"num_steps": 7, "max_steps": 5}, 5),
        ({"num_steps": 3, "max_steps": 5}, 3),
        ({"max_steps": 5}, 5),
        ({"num_epochs": 2}, 6),
        ({"num_epochs": 2, "steps_per_epoch": 2}, 4),
        ({"num_epochs": 2, "steps_per_epoch": 4, "max_steps": 6}, 6),
        ({"steps_per_epoch": 2}, 2),
        ({"num_steps": 7, "max_steps": 9, "initial_step": 4}, 5),
        ({"batch_size": 6}, 2),
    ],
)
def test_the_loader_counts_its_steps(settings: dict[str, Any], steps: int, tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path)
    cstorch.compile(nn.Linear(1, 1), backend="cpu")
    batches = list(loader(**settings))
    assert len(batches) == steps
    rows = settings.get("batch_size", 4)
    plain = [batch[0] for _ in range(steps) for batch in input_fn(batch_size=rows)][:steps]
    assert all(torch.equal(mine[0], theirs) for mine, theirs in zip(batches, plain, strict=True))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_steps": 3, "num_epochs": 1}, "num_steps excludes"),
        ({"num_steps": 3, "steps_per_epoch": 1}, "num_steps excludes"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"initial_step": -1}, "initial_step"),
        ({"max_steps": 4, "initial_step": 4}, "no step is left"),
    ],
)
def test_the_loader_refuses_what_excludes_each_other(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        loader(**settings)


class Endless(IterableDataset[torch.Tensor]):
    """Batches without an end, and so without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(4, 2)


def test_an_executor_runs_with_a_loader_without_a_length(tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path)
    cstorch.compile(nn.Linear(1, 1), backend="cpu")
    endless = cstorch.utils.data.DataLoader(lambda: DataLoader(Endless(), batch_size=None))
    assert len(list(cstorch.utils.data.DataExecutor(endless, num_steps=3))) == 3
    with pytest.raises(TypeError, match="no len"):
        list(endless)


def test_configure_can_be_called_once(tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path)
    with pytest.raises(UsageError, match="can only be called once and applies globally"):
        cstorch.configure(model_dir=tmp_path)


def test_configure_comes_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="configure"):
        cstorch.compile(nn.Linear(1, 1), backend="wse_ws")
    with pytest.raises(UsageError, match="configure"):
        list(loader())
    newest.backend("CPU", artifact_dir=tmp_path)
    with pytest.raises(UsageError, match="must be called first"):
        cstorch.configure()


def test_configure_takes_every_parameter_of_the_table(tmp_path: Path) -> None:
    cstorch.configure(
        model_dir=str(tmp_path),
        compile_dir=str(tmp_path / "compiled"),
        compile_only=False,
        validate_only=True,
        checkpoint_steps=10,
        num_csx=2,
        max_wgt_servers=3,
        mount_dirs=[str(tmp_path)],
        python_paths=["/lib"],
        transfer_processes=2,
        num_workers_per_csx=4,
        job_labels=["a=b"],
        max_act_per_csx=5,
        execution_strategy="pipeline",
    )
    assert backends.csx.performance.execution_strategy == "pipeline"
    compiled = cstorch.compile(nn.Linear(2, 1), backend="WSE_WS")
    assert compiled.backend.name == "WSE_WS"
    assert len(list(compiled.parameters())) == 2
    backend = newest.backend("CSX")
    assert backend.validate_only
    assert backend.artifact_dir == tmp_path
    config = backend.cluster_config
    assert (config.num_csx, config.max_wgt_servers, config.num_workers_per_csx) == (2, 3, 4)
    assert (config.max_act_per_csx, config.python_paths, config.job_labels) == (5, ["/lib"], ["a=b"])


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"num_csx": 0}, ConfigurationError, "num_csx"),
        ({"job_labels": ["none"]}, ConfigurationError, "key=value"),
        ({"mount_dirs": ["/no/such/folder"]}, ConfigurationError, "mount_dirs"),
        ({"checkpoint_steps": -1}, ConfigurationError, "checkpoint_steps"),
        ({"checkpoint_steps": 1.5}, TypeError, "checkpoint_steps"),
        ({"compile_only": True, "validate_only": True}, ConfigurationError, "exclude"),
        ({"execution_strategy": "pipelined"}, ConfigurationError, "weight_streaming or pipeline"),
    ],
)
def test_a_wrong_configuration_is_refused_and_can_be_made_right(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        cstorch.configure(**settings)
    cstorch.configure()


def test_unknown_backends_and_metrics_off_the_system_are_refused() -> None:
    cstorch.configure()
    with pytest.raises(ConfigurationError, match="'gpu'"):
        cstorch.compile(nn.Linear(1, 1), backend="gpu")
    with pytest.raises(ConfigurationError, match="compute_on_system"):
        cstorch.metrics.AccuracyMetric("accuracy", compute_on_system=False)


def test_figures_are_iterated_as_1_8_and_as_1_9_do() -> None:
    accuracy = cstorch.metrics.AccuracyMetric("accuracy")
    accuracy(labels=torch.tensor([1, 2]), predictions=torch.tensor([1, 0]))
    figures = cstorch.metrics.compute_all_metrics()
    assert list(figures) == list(figures.items()) == [("accuracy", 0.5)]


def halve(state: State, step: int) -> dict[str, torch.Tensor]:
    state["state.model.weight"].mul_(0.5)
    return {"output_values_0": torch.tensor(float(step)), "output_mean": torch.tensor(float(step))}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(halve)


def test_checkpoints_are_taken_on_checkpoint_steps_only(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path, checkpoint_steps=3, mgmt_address=cluster.address)
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    compiled = cstorch.compile(model, backend="wse_ws")
    saved: dict[int, float] = {}

    @cstorch.compile_step
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = compiled(batch[0]).mean()
        with torch.no_grad():
            model.weight.mul_(0.5)
        return loss

    @cstorch.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def save(number: int) -> None:
        cstorch.save({"model": model.state_dict()}, tmp_path / f"{number}.mdl")
        saved[number] = float(cstorch.load(tmp_path / f"{number}.mdl")["model"]["weight"][0, 0])

    @cstorch.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def save_too_early(number: int) -> None:
        with pytest.raises(StateError, match="checkpoint step"):
            model.weight.cpu()

    for i, batch in enumerate(loader(num_steps=8)):
        step(batch)
        if i % 3 == 0 or (i + 1) % 3 == 0 or i == 7:  # as scripts count from 0, and from 1, and the last
            save(i)
        else:
            save_too_early(i)
    assert saved == {i: 0.5 ** (i + 1) for i in (0, 2, 3, 5, 6, 7)}


def test_tensors_say_that_they_are_on_xla(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path, mgmt_address=cluster.address)
    model = nn.Linear(2, 1)
    compiled = cstorch.compile(model, backend="wse_ws")
    assert all(parameter.device.type == "xla" for parameter in model.parameters())
    device = model.weight.device
    assert torch.tensor(2.0).to(device).device == device
    assert torch.arange(3, device=device).device == device
    assert torch.zeros(2, device="xla").cpu().tolist() == [0, 0]
    assert model.weight.cpu().device.type == "cpu"

    @cstorch.compile_step
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        norm = torch.tensor(0.0).to(device)
        norm += model.weight.norm()
        return compiled(batch[0]).mean() + norm + torch.ones(1, device=model.weight.device).sum()

    for batch in loader(num_steps=1):
        step(batch)
    newest.backend("CSX")
    close_backend()
    assert model.weight.device.type == "lazy"


def test_scalar_summaries_are_kept_until_the_script_writes_them(tmp_path: Path) -> None:
    cstorch.configure(model_dir=tmp_path)
    cstorch.compile(nn.Linear(1, 1), backend="cpu")
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    @cstorch.compile_step
    def step(batch: list[torch.Tensor]) -> None:
        cstorch.scalar_summary("first", batch[0][0, 0])

    @cstorch.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def write(number: int) -> None:
        cstorch.save_summaries(Writer(), number)

    for i, batch in enumerate(loader(num_steps=4)):
        step(batch)
        if i % 2 == 1:
            write(i)
    assert written == [("first", 8.0, 1), ("first", 0.0, 3)]


def test_release_1_9_has_backend_and_executor(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    compiled = cstorch.compile(nn.Linear(2, 1), cstorch.backend())
    executor = cstorch.utils.data.DataExecutor(loader(), num_steps=4, cs_config=cstorch.utils.CSConfig())

    @cstorch.compile_step
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compiled(batch[0]).mean()

    assert len([step(batch) for batch in executor]) == 4

"""cerebras_torch, release 1.2: plain loops on the CPU and on a cluster that is a fake."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster, State
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_torch as cbtorch
import cstorch
from cerebras_torch.core import cb_model
from cstorch.distributed import worker
from cstorch.errors import ConfigurationError, TraceError, UsageError


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2) / 24), batch_size=4)


def count(state: State, step: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(float(step)) for name in ("output_loss", "output_mean")}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(count)


class Loop:
    """A model, its optimizer, and the body of a loop over its input."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = cbtorch.module(nn.Linear(2, 1))
        self.optimizer = cbtorch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = cbtorch.dataloader(loader())
        self.losses: list[float] = []

    def report(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())

    def body(self, session: cbtorch.Session, batch: list[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch[0]).pow(2).mean() * factor
        loss.backward()
        self.optimizer.step()
        session.add_step_closure(self.report, args=(loss,))
        return loss


@pytest.mark.parametrize("spelling", ["model, optimizer, criterion", "dataloader"])
def test_a_plain_loop_on_the_cpu_is_plain_pytorch(tmp_path: Path, spelling: str) -> None:
    cbtorch.initialize(service_workdir=tmp_path)
    loop = Loop()
    objects = (loop.loader,) if spelling == "dataloader" else (loop.model, loop.optimizer, nn.MSELoss())
    with cbtorch.Session(*objects, mode="train") as session:
        for _ in range(2):
            for batch in loop.loader:
                loop.body(session, batch)
                session.mark_step()

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            loss = model(batch[0]).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert loop.losses == pytest.approx(losses, rel=1e-6)


def on(cluster: FakeCluster, tmp_path: Path) -> Loop:
    cbtorch.initialize(cs_ip=cluster.address, service_workdir=tmp_path)
    return Loop()


def test_the_body_is_recorded_and_runs_as_one_program(cluster: FakeCluster, tmp_path: Path) -> None:
    loop = on(cluster, tmp_path)
    with cbtorch.Session(loop.model, loop.optimizer, None, mode="train") as session:
        for number, batch in enumerate(loop.loader):
            assert loop.losses == [float(step) for step in range(1, number + 1)]
            loss = loop.body(session, batch)
            with pytest.raises(TraceError, match="local_scalar_dense"):
                loss.item()
            if number == 1:
                session.mark_step()
                assert loop.losses == [1.0, 2.0]
                with pytest.raises(UsageError, match="after mark_step"):
                    session.add_step_closure(loop.report, args=(loss,))
    assert loop.losses == [1.0, 2.0, 3.0]
    assert len(cluster.compiled) == 1
    assert cluster.begun[0].num_steps == 3
    assert torch.ones(2).sum().item() == 2.0  # nothing is recorded any more


def doubled(loop: Loop, session: cbtorch.Session, number: int, batch: Any) -> None:
    loop.body(session, batch, factor=1.0 + number)


def without_closure(loop: Loop, session: cbtorch.Session, number: int, batch: Any) -> None:
    loop.body(session, batch)
    if number == 0:
        session.add_step_closure(lambda mean: None, args=(batch[0].mean(),))


def run(loop: Loop, body: Callable[[Loop, cbtorch.Session, int, Any], object]) -> None:
    with cbtorch.Session(loop.loader) as session:
        for number, batch in enumerate(loop.loader):
            body(loop, session, number, batch)


@pytest.mark.parametrize("body", [doubled, without_closure])
def test_a_body_that_changes_is_refused(
    cluster: FakeCluster, tmp_path: Path, body: Callable[[Loop, cbtorch.Session, int, Any], object]
) -> None:
    loop = on(cluster, tmp_path)
    with pytest.raises(UsageError, match="something else in step 2 than in the first"):
        run(loop, body)
    assert torch.ones(2).sum().item() == 2.0
    assert cbtorch.current_backend().is_tracing is False


def test_an_error_in_the_body_ends_the_recording(cluster: FakeCluster, tmp_path: Path) -> None:
    loop = on(cluster, tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(loop, lambda *_: 1 // 0)
    assert torch.ones(2).sum().item() == 2.0
    assert cbtorch.current_backend().is_tracing is False
    with cbtorch.Session(loop.loader):
        pass


def test_what_comes_in_the_wrong_order_is_refused(tmp_path: Path) -> None:
    for early in (lambda: cbtorch.module(nn.Linear(1, 1)), lambda: cbtorch.dataloader(loader()), cbtorch.Session):
        with pytest.raises(UsageError, match="initialize"):
            early()
    cbtorch.initialize(service_workdir=tmp_path)
    with pytest.raises(UsageError, match="called before"):
        cbtorch.initialize(service_workdir=tmp_path)
    loop = Loop()
    with pytest.raises(UsageError, match="inside"):
        next(iter(loop.loader))
    with cbtorch.Session(loop.loader), pytest.raises(UsageError, match="open already"), cbtorch.Session(loop.loader):
        pass
    with pytest.raises(ConfigurationError, match="mode"):
        cbtorch.Session(loop.loader, mode="predict")  # type: ignore[arg-type]
    torch_sgd = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"what cbtorch\.optimizer\(\.\.\.\) makes of it"):
        cbtorch.Session(loop.model, torch_sgd, None)
    assert cbtorch.optimizer(loop.optimizer) is loop.optimizer
    with pytest.raises(TypeError, match="DataLoader with a length"):
        cbtorch.dataloader(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leave device out"):
        cbtorch.module(nn.Linear(1, 1), device="cpu")


def test_initialize_refuses_unknown_settings() -> None:
    with pytest.raises(TypeError, match="cs_port"):
        cbtorch.initialize(cs_port=1)  # type: ignore[call-arg]


def test_a_host_without_a_port_only_asks_for_a_cluster(tmp_path: Path) -> None:
    cbtorch.initialize(cs_ip="10.0.0.1", service_workdir=tmp_path, validate_only=True, num_csx=2)
    backend = cstorch.backend("CSX")
    assert backend.cluster_config.mgmt_address is None
    assert backend.cluster_config.num_csx == 2
    assert cb_model.use_cs()
    assert cb_model.device() == cstorch.current_torch_device()


@pytest.mark.parametrize(("size", "is_hit"), [(50, False), (150, True)])
def test_the_limit_of_the_worker_cache_is_true_or_false_and_a_tuple(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_hit: bool
) -> None:
    monkeypatch.setattr(worker, "WORKER_CACHE_ROOT", str(tmp_path / "cache"))
    usage = SimpleNamespace(total=1000, used=700)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_bytes(bytes(size))
    limit = cb_model.hit_worker_cache_limit(str(tmp_path / "data"), str(tmp_path / "cache/data"))
    assert bool(limit) is is_hit
    assert limit == (is_hit, size, 100)


def test_cb_model_answers_for_a_lone_process(tmp_path: Path) -> None:
    cbtorch.initialize(service_workdir=tmp_path)
    assert not cb_model.use_cs()
    assert not cb_model.is_streamer()
    assert cb_model.is_master_ordinal()
    assert cb_model.to_cpu({"a": [torch.ones(1), 2]}) == {"a": [torch.ones(1), 2]}
    cb_model.mark_step()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {"lr": 0.1, "foreach": False}),
        ("RMSprop", {"momentum": 0.5}),
        ("Adagrad", {}),
    ],
)
def test_an_optimizer_of_torch_is_wrapped_with_its_groups_and_settings(name: str, settings: dict[str, Any]) -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([3.0]))]

    def step(optimizer: torch.optim.Optimizer, both: list[nn.Parameter]) -> None:
        optimizer.zero_grad()
        (both[0].pow(2).sum() + both[1].pow(3).sum()).backward()
        optimizer.step()

    made = []
    for both in (parameters(), parameters()):
        groups = [{"params": both[:1]}, {"params": both[1:], "lr": 0.01}]
        made.append((getattr(torch.optim, name)(groups, **settings), both))
    (plain, expected), (given, got) = made
    wrapped = cbtorch.optimizer(given)
    assert type(wrapped) is getattr(cbtorch.optim, name)
    assert [group["lr"] for group in wrapped.param_groups] == [group["lr"] for group in given.param_groups]
    for _ in range(3):
        step(plain, expected)
        step(wrapped, got)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_optimizer_that_has_no_like_is_not_wrapped() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match="no setting 'maximize', which is True"):
        cbtorch.optimizer(torch.optim.RMSprop(parameters, maximize=True))
    with pytest.raises(UsageError, match=r"LBFGS .* subclass of cerebras_torch\.optim\.Optimizer"):
        cbtorch.optimizer(torch.optim.LBFGS(parameters))
    stepped = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    parameters[0].sum().backward()
    stepped.step()
    with pytest.raises(UsageError, match="before its first step"):
        cbtorch.optimizer(stepped)


def test_a_backend_of_release_1_9_begins_a_run_for_models_that_set_compiler_settings(tmp_path: Path) -> None:
    import cerebras_pytorch
    import cerebras_pytorch.experimental as release_1_9

    with pytest.raises(UsageError, match="initialize"):
        cerebras_pytorch.state()
    release_1_9.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    cerebras_pytorch.state().full_config.matching.kernel.inc_pwt_estimate = True
    assert cerebras_pytorch.state().full_config.matching.kernel.inc_pwt_estimate is True
    assert cerebras_pytorch.state().progress_tracker is None
    environment = cerebras_pytorch.env()
    assert (environment.service_workdir, environment.appliance) == (str(tmp_path), True)
    environment.weight_streaming_mode = False
    assert not cerebras_pytorch.env().weight_streaming_mode

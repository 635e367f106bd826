"""Several executions over one job: training, evaluation, training, and a change in between, beside plain PyTorch."""

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_rig import RunningCluster
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.data import DataExecutor
from cstorch.errors import InputError, UsageError
from wsc.v1 import management_pb2

STEPS = 3


def input_fn(steps: int = STEPS) -> DataLoader[Any]:
    rows = torch.randn(8 * steps, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)


def training_step(compiled: Any, optimizer: Any) -> Any:
    @cstorch.trace
    def train(batch: list[torch.Tensor]) -> torch.Tensor:
        rows, wanted = batch
        loss = (compiled(rows) - wanted).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return train


def expected(model: nn.Sequential) -> list[float]:
    """What plain PyTorch gives for the same script."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for kind in ("train", "eval", "train", "change", "train"):
        if kind == "change":
            with torch.no_grad():
                model.get_parameter("0.weight").mul_(0.5)
            continue
        for rows, wanted in input_fn():
            loss = (model(rows) - wanted).pow(2).mean()
            losses.append(loss.item())
            if kind == "train":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return losses


@pytest.mark.cluster
def test_weights_stay_on_the_cluster_from_execution_to_execution(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cstorch")
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    jobs = {job.job for job in cluster.jobs()}
    config = cstorch.distributed.ClusterConfig(num_csx=2)
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = expected(copy.deepcopy(model))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    report = cstorch.step_closure(lambda loss: losses.append(loss.item()))

    train = training_step(compiled, optimizer)

    @cstorch.trace
    def evaluate(batch: list[torch.Tensor]) -> torch.Tensor:
        rows, wanted = batch
        return (compiled(rows) - wanted).pow(2).mean()

    def loop(step: Callable[[list[torch.Tensor]], torch.Tensor], checkpoint_steps: int = 0) -> None:
        loader = cstorch.utils.data.DataLoader(input_fn)
        for batch in DataExecutor(loader, num_steps=STEPS, checkpoint_steps=checkpoint_steps):
            report(step(batch))

    loop(train)
    model.eval()
    loop(evaluate)
    model.train()
    loop(train, checkpoint_steps=STEPS)
    model.get_parameter("0.weight").data.mul_(0.5)
    loop(train)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-5, atol=1e-7)
    sent = [message.split(" state")[0] for message in caplog.messages if message.startswith("Sent")]
    assert sent == ["Sent 8 of 8", "Sent 0 of 4", "Sent 0 of 8", "Sent 1 of 8"]
    assert len({job.job for job in cluster.jobs()} - jobs) == 1  # the oldest may be forgotten
    backend.cluster_config.num_csx = 1
    with pytest.raises(UsageError, match="locked in on the first compile job"):
        loop(train)


LENGTH = 40  # steps of a loop that is left


def backend_of(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A backend on two wafers, whose states a script may change where it has not saved them."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    config = cstorch.distributed.ClusterConfig(num_csx=2, changes_need_checkpoint=False)
    return cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)


@pytest.mark.cluster
@pytest.mark.parametrize("activation_steps", [1, 4])
def test_a_loop_that_is_left_gives_the_states_of_a_shorter_one(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, activation_steps: int
) -> None:
    """Left by break, by an exception and by a closure, then saved, and trained on: equal to the bit."""
    backend = backend_of(cluster, monkeypatch, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    initial = copy.deepcopy(model.state_dict())
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.05)
    closures: list[int] = []
    numbers = itertools.count()

    train = training_step(compiled, optimizer)

    def executor(num_steps: int = LENGTH) -> DataExecutor:
        loader = cstorch.utils.data.DataLoader(input_fn, LENGTH)
        return DataExecutor(loader, num_steps, checkpoint_steps=8, activation_steps=activation_steps)

    def saved() -> dict[str, torch.Tensor]:
        path = tmp_path / f"{next(numbers)}.mdl"
        cstorch.save(model.state_dict(), path)
        return {name: value.clone() for name, value in cstorch.load(path).items()}

    for batch in (running := executor()):
        train(batch)
        if running.user_iteration == 2:
            break
    left = [saved()]
    with pytest.raises(KeyError):  # noqa: PT012
        for batch in (running := executor()):
            train(batch)
            if running.user_iteration == 5:
                raise KeyError
    stopping = executor()  # not saved before: this one begins where the last one is left

    @cstorch.step_closure
    def stop(loss: torch.Tensor) -> None:
        closures.append(stopping.user_iteration)
        if len(closures) == 3:
            stopping.stop()

    for batch in stopping:
        stop(train(batch))
    assert closures == [activation_steps, 2 * activation_steps, 3 * activation_steps]
    left.append(saved())

    model.load_state_dict(initial)
    shorter = []
    for num_steps in (2, 5, closures[-1]):
        for batch in executor(num_steps):
            train(batch)
        if num_steps != 5:
            shorter.append(saved())
    for one, other in zip(left, shorter, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in initial)


class Pictures(Dataset[Any]):
    """Rows, of which one has no picture or a label that is out of range."""

    def __init__(self, bad: int, kind: str) -> None:
        self._bad = bad
        self._kind = kind
        self._rows = torch.randn(8 * LENGTH, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_bad = index == self._bad
        if is_bad and self._kind == "no picture":
            raise OSError("this is no picture")
        return self._rows[index], torch.tensor(3 if is_bad else index % 3)


def rate(step: int) -> float:
    """The rate of a schedule after so many steps."""
    return 0.05 - 0.04 * step / LENGTH


def pictures(bad: int, kind: str) -> DataLoader[Any]:
    return DataLoader(Pictures(bad, kind), batch_size=8)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["no picture", "a label out of range"])
@pytest.mark.parametrize("activation_steps", [1, 4])
def test_a_bad_batch_costs_no_step_before_it(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, activation_steps: int
) -> None:
    """The script gets the outputs and the checkpoint of all steps before, catches the error, and trains on."""
    backend = backend_of(cluster, monkeypatch, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 0.01, LENGTH)
    losses: list[float] = []
    saved: list[int] = []

    @cstorch.trace
    def train(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(compiled(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    report = cstorch.step_closure(lambda loss: losses.append(loss.item()))

    @cstorch.checkpoint_closure
    def save() -> None:
        saved.append(executor.user_iteration)

    loader = cstorch.utils.data.DataLoader(pictures, 8 * 13 + 2, kind)  # the batch of step 14
    executor = DataExecutor(loader, LENGTH, checkpoint_steps=4, activation_steps=activation_steps)
    with pytest.raises(InputError, match="is no picture" if kind == "no picture" else "out of bounds"):  # noqa: PT012
        for batch in executor:
            report(train(batch))
            save()
    assert saved == [4, 8, 12]
    assert float(optimizer.state_dict()["param_groups"][0]["lr"]) == pytest.approx(rate(13))
    assert schedule.get_last_lr() == [pytest.approx(rate(13))]
    for batch in DataExecutor(cstorch.utils.data.DataLoader(pictures, -1, kind), 3, activation_steps=activation_steps):
        report(train(batch))

    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected_losses = []
    for step, (rows, labels) in enumerate(
        [*itertools.islice(pictures(-1, kind), 13), *itertools.islice(pictures(-1, kind), 3)]
    ):
        plain_optimizer.param_groups[0]["lr"] = rate(step)
        loss = nn.functional.cross_entropy(plain(rows), labels)
        expected_losses.append(loss.item())
        plain_optimizer.zero_grad()
        loss.backward()
        plain_optimizer.step()
    steps = range(1, 17) if activation_steps == 1 else (4, 8, 12, 16)
    torch.testing.assert_close(losses, [expected_losses[step - 1] for step in steps], rtol=1e-5, atol=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-6)
    assert all(job.phase != management_pb2.JOB_PHASE_FAILED for job in cluster.jobs()[:1])

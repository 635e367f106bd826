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
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.data import DataExecutor
from cstorch.errors import UsageError

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


@pytest.mark.cluster
@pytest.mark.parametrize("activation_steps", [1, 4])
def test_a_loop_that_is_left_gives_the_states_of_a_shorter_one(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, activation_steps: int
) -> None:
    """Left by break, by an exception and by a closure, then saved, and trained on: equal to the bit."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    config = cstorch.distributed.ClusterConfig(num_csx=2, changes_need_checkpoint=False)
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
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

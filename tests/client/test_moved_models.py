"""Models that a script moves, copies, or calls through functions of its own, as plain PyTorch lets it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_cluster import FakeCluster
from halved_weight import Setup
from torch import nn

import cerebras.pytorch as cstorch
from cstorch._internal.tracing import DEVICE, LazyTensor
from cstorch._internal.tracing.tensor import keep_parameters


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before: tuple[Any, Any] = (nn.Module.to, nn.Module.cpu)
    keep_parameters()
    yield
    nn.Module.to, nn.Module.cpu = before  # type: ignore[method-assign]


def model() -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 3, batch_first=True), nn.BatchNorm1d(3))
    made.append(nn.Linear(3, 5, bias=False))
    made[3].weight = nn.Parameter(torch.randn(5, 3))
    return made


def test_a_model_that_is_moved_there_and_back_has_the_same_parameters() -> None:
    moved, other = model(), model()
    before = list(moved.parameters())
    before[0].grad = torch.ones_like(before[0])
    for device in (DEVICE, torch.device("cpu"), DEVICE):
        moved.to(device)
        assert all(one is two for one, two in zip(moved.parameters(), before, strict=True))
        assert all(isinstance(each, nn.Parameter) for each in before)
        assert all(isinstance(each, LazyTensor) == (device == DEVICE) for each in moved.state_dict().values())
        assert moved[1].weight_ih_l0 is moved[1]._flat_weights[0]
    assert moved.cpu() is moved
    assert all(one is two for one, two in zip(moved.parameters(), before, strict=True))
    assert torch.equal(before[0].grad, torch.ones(5, 4))
    for name, value in other.state_dict().items():
        assert torch.equal(moved.state_dict()[name], value)


def test_tied_weights_stay_tied_and_a_type_is_changed_too() -> None:
    moved = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    moved[1].weight = moved[0].weight
    tied = moved[0].weight
    moved.to(DEVICE, torch.float64)
    assert moved[0].weight is moved[1].weight is tied
    assert tied.dtype is torch.float64
    moved.to("cpu")
    assert moved[0].weight is moved[1].weight is tied


def test_a_copy_of_a_compiled_model_is_a_model(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    copied = copy.deepcopy(setup.compiled)
    assert isinstance(copied, nn.Linear)
    assert copied.weight is not setup.model.weight


def test_a_function_of_torch_that_a_script_has_wrapped_runs_once(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def wrapped(name: str, owner: object) -> None:
        original = getattr(owner, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    wrapped("softmax", F)
    wrapped("norm", torch)
    wrapped("backward", torch.Tensor)
    setup = Setup(cluster, tmp_path)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = F.softmax(setup.compiled(batch), -1).sum() + torch.norm(setup.model.weight)
        loss.backward()
        return loss

    for batch in setup.executor(1):
        step(batch)
    assert calls == ["softmax", "norm", "backward"]


async def coroutine(batch: torch.Tensor) -> torch.Tensor:
    return batch


def generator(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch


@pytest.mark.parametrize("function", [coroutine, generator])
def test_a_function_that_does_not_run_when_it_is_called_is_no_step(function: object) -> None:
    with pytest.raises(TypeError, match="no generator, and no coroutine"):
        cstorch.trace(function)  # type: ignore[arg-type]

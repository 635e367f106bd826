"""Tensors of a checkpoint that are read when they are used, and not before."""

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cstorch._internal.checkpoint_files.dataset import Dataset
from cstorch._internal.checkpoint_files.deferred import DeferredTensor
from cstorch._internal.tracing import device_scope
from cstorch.errors import CheckpointError
from cstorch.storage import load, save


class Reads:
    """Notes what is read of checkpoints, and how many values are there at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.most = 0
        alive: list[weakref.ref[np.ndarray]] = []
        original = Dataset._array

        def note(dataset: Dataset, path: Path) -> np.ndarray:
            array = original(dataset, path)
            self.names.append(dataset.name.removeprefix("/"))
            alive.append(weakref.ref(array))
            self.most = max(self.most, sum(one() is not None for one in alive))
            return array

        monkeypatch.setattr(Dataset, "_array", note)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7)}, tmp_path / "a.mdl")
    return tmp_path / "a.mdl"


def test_nothing_is_read_before_it_is_used_and_then_only_that(path: Path, reads: Reads) -> None:
    tree = load(path)
    assert (tree["a"].shape, tree["a"].dtype, tree["a"].device.type) == ((2, 3), torch.float32, "cpu")
    assert repr(tree["a"]) == "DeferredTensor(shape=(2, 3), dtype=torch.float32)"
    assert reads.names == []
    assert torch.equal(tree["a"] + 1, torch.arange(1.0, 7.0).reshape(2, 3))
    assert tree["b"].item() == 7
    assert reads.names == ["a", "b"]


def test_each_map_location_reads_when_it_says(path: Path, reads: Reads) -> None:
    anew, cached = load(path)["a"], load(path, "cache")["a"]
    for tensor in (anew, anew, cached, cached):
        assert tensor.sum().item() == 15
    assert reads.names == ["a"] * 3
    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}):
        reads.names.clear()
        tree = load(path, location)
        assert reads.names == ["a", "b"]
        assert type(tree["a"]) is torch.Tensor
    on_device = load(path, "lazy")["a"]
    assert on_device.device.type == "lazy"
    assert on_device.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError, match="no PyTorch file"):
        load(path, lambda storage, location: storage)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: np.asarray(tensor),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to(torch.float64),
        lambda tensor: copy.deepcopy(tensor),
        lambda tensor: pickle.loads(pickle.dumps(tensor)),  # noqa: S301
        lambda tensor: torch.zeros(2, 3).copy_(tensor),
        lambda tensor: nn.Parameter(tensor),
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.data,
        lambda tensor: torch.stack([tensor, tensor])[1],
        lambda tensor: tensor[:, :],
    ],
)
def test_every_use_sees_the_values(path: Path, use: Callable[[torch.Tensor], Any]) -> None:
    got = use(load(path)["a"])
    assert np.array_equal(torch.as_tensor(got).detach().numpy(), np.arange(6.0).reshape(2, 3))


def test_writes_and_views_stay(path: Path) -> None:
    tensor = load(path)["a"]
    view = tensor[0]
    assert tensor.add_(1) is tensor
    assert tensor.detach().sum().item() == 21
    view.zero_()
    assert tensor.tolist() == [[0, 0, 0], [4, 5, 6]]
    assert load(path)["a"].sum().item() == 15


def test_a_model_and_its_optimizer_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.mdl")
    again = nn.Linear(3, 2)
    other = torch.optim.AdamW(again.parameters())
    tree = load(tmp_path / "a.mdl")
    again.load_state_dict(tree["model"])
    other.load_state_dict(tree["optimizer"])
    assigned = nn.Linear(3, 2)
    assigned.load_state_dict(load(tmp_path / "a.mdl")["model"], assign=True)
    third = torch.optim.AdamW(assigned.parameters())
    third.load_state_dict(load(tmp_path / "a.mdl")["optimizer"])
    for _ in range(2):
        expected = train(model, optimizer)
        assert torch.equal(train(again, other), expected)
        assert torch.equal(train(assigned, third), expected)


def test_one_tensor_at_a_time_goes_to_the_device(tmp_path: Path, reads: Reads) -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    save(model.state_dict(), tmp_path / "a.mdl")
    with device_scope():
        on_device = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    on_device.load_state_dict(load(tmp_path / "a.mdl"))
    assert len(reads.names) == 12
    assert reads.most == 1
    save(load(tmp_path / "a.mdl"), tmp_path / "b.mdl")
    assert reads.most == 1
    for name, value in on_device.state_dict().items():
        assert torch.equal(value.cpu(), model.state_dict()[name])


def test_a_file_that_changed_is_an_error(path: Path) -> None:
    tree = load(path)
    other = path.with_name("other")
    save({"a": torch.zeros(2, 3), "b": torch.tensor(7)}, other)
    other.rename(path)
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        tree["a"].sum()
    path.unlink()
    with pytest.raises(CheckpointError, match="was removed before"):
        tree["a"].sum()


def test_tensors_of_one_value_are_stored_as_that(tmp_path: Path) -> None:
    with device_scope():
        zeros = torch.zeros(1000, 1000, dtype=torch.int32)
    save({"zeros": zeros}, tmp_path / "a.mdl")
    save(load(tmp_path / "a.mdl"), tmp_path / "b.mdl")
    for name in ("a.mdl", "b.mdl"):
        with h5py.File(tmp_path / name) as file:
            assert "zeros" not in file
        assert torch.equal(load(tmp_path / name)["zeros"], torch.zeros(1000, 1000, dtype=torch.int32))
    changed = load(tmp_path / "a.mdl")
    changed["zeros"][0, 0] = 1
    save(changed, tmp_path / "c.mdl")
    assert load(tmp_path / "c.mdl")["zeros"].sum().item() == 1


def test_tied_weights_of_a_state_dict_are_one_tensor(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    with device_scope():
        on_device = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    on_device["b"].weight = on_device["a"].weight
    for number, each in enumerate((model, on_device)):
        save(each.state_dict(), tmp_path / str(number))
        tree = load(tmp_path / str(number))
        assert tree["a.weight"] is tree["b.weight"]
        assert tree["a.bias"] is not tree["b.bias"]
        save(tree, tmp_path / f"{number}.again")
        with h5py.File(tmp_path / f"{number}.again") as file:
            assert len(file) == 3


def test_safetensors_and_pytorch_files_are_known_by_their_content(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4).bfloat16(), "n": torch.arange(3, dtype=torch.int8)}
    save_file(tensors, tmp_path / "a.bin")
    torch.save({"model": tensors}, tmp_path / "b.bin")
    torch.save({"model": tensors}, tmp_path / "c.bin", _use_new_zipfile_serialization=False)
    assert isinstance(load(tmp_path / "a.bin")["w"], DeferredTensor)
    trees = [load(tmp_path / "a.bin"), *(load(tmp_path / name)["model"] for name in ("b.bin", "c.bin"))]
    for tree in trees:
        assert tree.keys() == tensors.keys()
        for name, value in tensors.items():
            assert torch.equal(tree[name] * 1, value)
    torch.save({"a": Path("x")}, tmp_path / "d.bin")
    with pytest.raises(CheckpointError, match="weights_only"):
        load(tmp_path / "d.bin")

"""Checkpoints: what goes in comes out, and nothing else is believed."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cstorch._internal.checkpoint_files.layout as layout
from cstorch.errors import CheckpointError
from cstorch.storage import load, save


def tree() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "model": OrderedDict({"fc1.weight": weight, "fc1.tied": weight, "mask": torch.tensor([True, False])}),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3, dtype=torch.int64)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "half": torch.randn(5, 2).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "step": 7,
        "flag": True,
        "name": "run",
        "nothing": None,
    }


def assert_equal(left: object, right: object) -> None:
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert isinstance(right, dict)
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert isinstance(right, list)
        for mine, other in zip(left, right, strict=True):
            assert_equal(mine, other)
    else:
        assert left == right
        assert type(left) is type(right)


def test_round_trip(tmp_path: Path) -> None:
    saved = tree()
    save(saved, tmp_path / "a.mdl")
    assert_equal(saved, load(tmp_path / "a.mdl"))
    assert os.listdir(tmp_path) == ["a.mdl"]


def test_what_is_loaded_is_plain_pytorch(tmp_path: Path) -> None:
    save(tree(), tmp_path / "a.mdl")
    torch.save(load(tmp_path / "a.mdl", map_location="cpu")["model"], tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["fc1.weight"], tree()["model"]["fc1.weight"])


def test_tied_tensors_are_stored_once_and_load_tied(tmp_path: Path) -> None:
    save(tree(), tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl") as file:
        assert "model.fc1.weight" in file
        assert "model.fc1.tied" not in file
    model = load(tmp_path / "a.mdl")["model"]
    assert model["fc1.weight"] is model["fc1.tied"]


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    save(tree(), tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl") as file:
        assert file.attrs["__version__"] == 0.5
        assert file.attrs["__SUCCESS__"]
        dataset = file["half"]
        assert dataset.dtype == np.int16
        assert dataset.attrs["__TYPE__"] == "TorchTensorSerializer"
        assert dataset.attrs["shapes"].tolist() == [[5, 2]]
        assert dataset.attrs["dtypes"].tolist() == ["torch.bfloat16"]
        assert dataset.attrs["rtfx_dtypes"].tolist() == [15]
        assert json.loads(file.attrs["step.__metadata__"])["step.__metadata__"]["scalar_value"] == 7


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "a.mdl")
    with pytest.raises(FileExistsError, match="never overwritten"):
        save({"a": 2}, tmp_path / "a.mdl")
    assert load(tmp_path / "a.mdl") == {"a": 1}


@pytest.mark.parametrize("leaf", [object(), torch.zeros(2, dtype=torch.int8), {1, 2}])
def test_what_a_checkpoint_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path, leaf: object) -> None:
    with pytest.raises(TypeError, match=r"cannot hold 'a\.b'"):
        save({"a": {"b": leaf}}, tmp_path / "a.mdl")
    assert os.listdir(tmp_path) == []


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        save({"a": {"b": 1}, "a.b": 2}, tmp_path / "a.mdl")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"nothing", bytes(8) + b"{"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"no checkpoint|damaged"):
            load(tmp_path / "a")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(tmp_path / "b.h5")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "c.mdl")


def test_partial_and_unknown_versions_are_refused(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl", "a") as file:
        del file.attrs["__SUCCESS__"]
    with pytest.raises(CheckpointError, match="partially written"):
        load(tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl", "a") as file:
        file.attrs["__version__"] = 9.0
    with pytest.raises(CheckpointError, match=r"format 9\.0"):
        load(tmp_path / "a.mdl")


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl", "a") as file:
        file.attrs["a.__metadata__"] = json.dumps({"a.__metadata__": {"__TYPE__": "ObjectSerializer"}})
    with pytest.raises(CheckpointError, match="unpickling runs code"):
        load(tmp_path / "a.mdl")


class Bytes(bytes):
    """Of a file, shown in short where a test fails."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    path = tmp_path_factory.mktemp("saved") / "a.mdl"
    save({"weight": torch.randn(64, 64), "bias": torch.randn(64), "step": 3}, path)
    return Bytes(path.read_bytes())


@given(where=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_data_is_refused(
    saved: bytes, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "a.mdl"
    path.write_bytes(saved)
    with h5py.File(path) as file:
        weight = file["weight"].id
        start, size = weight.get_offset(), weight.get_storage_size()
    damaged = bytearray(saved)
    damaged[start + int(size * where)] ^= 1 << bit
    path.write_bytes(damaged)
    loaded = load(path)
    with pytest.raises(CheckpointError, match="'weight' do not have the checksum"):
        loaded["weight"].sum()
    assert loaded["bias"].shape == (64,)


@pytest.mark.cluster
def test_a_save_killed_at_any_moment_leaves_whole_files_and_refused_parts(tmp_path: Path) -> None:
    # A fork for each folder: to import torch for each would take seconds.
    script = """
        import itertools, os, sys, torch
        from cstorch.storage import save
        for folder in sys.stdin:
            if (child := os.fork()) == 0:
                tree = {str(n): torch.full((500, 1000), float(n)) for n in range(20)}
                for number in itertools.count():
                    save(tree, f"{folder.strip()}/{number}.mdl")
                    print(os.getpid(), number, flush=True)
            print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    folders = [tmp_path / str(moment) for moment in range(4)]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saving:
        assert saving.stdin is not None
        assert saving.stdout is not None
        for moment, folder in enumerate(folders):
            folder.mkdir()
            print(folder, file=saving.stdin, flush=True)
            process, number = saving.stdout.readline().split()
            assert number == "0"
            # While it writes the next one: when the file has grown so far.
            deadline = time.monotonic() + 30
            while not any(part.stat().st_size > moment * 10_000_000 for part in folder.glob("1.mdl*")):
                assert time.monotonic() < deadline
            os.kill(int(process), signal.SIGKILL)
            while (said := saving.stdout.readline()) != f"status {-signal.SIGKILL}\n":
                assert said.startswith(process)  # another file was saved
    for folder in folders:
        for path in folder.iterdir():
            refusal = ""
            try:
                assert [float(value.mean()) for value in load(path).values()] == list(range(20))
            except CheckpointError as error:
                refusal = str(error)
            # A part may be whole already, but for its name.
            assert not refusal or path.suffix != ".mdl"
            assert re.search(r"^$|partially written|truncated or damaged|no checkpoint", refusal)
        assert (folder / "0.mdl").exists()


def test_the_checksum_covers_every_dataset(tmp_path: Path) -> None:
    save(tree(), tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl") as file:
        assert all(layout.CHECKSUM in file[key].attrs for key in file)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("truncated", CheckpointError, "truncated or damaged"),
        ("foreign", CheckpointError, "is no checkpoint: neither.*cstorch.save.*nor.*torch.load"),
        ("another H5 file", CheckpointError, "not a checkpoint that cstorch.save wrote"),
        ("empty", CheckpointError, "is no checkpoint: .*the file is empty"),
        ("pickle", CheckpointError, r"is no checkpoint: .*\(UnpicklingError: "),
        ("missing", FileNotFoundError, "there is no checkpoint"),
        ("folder", CheckpointError, "is a folder, not a checkpoint; name a file in it"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(tmp_path: Path, kind: str, error: type[Exception], text: str) -> None:
    path = tmp_path / "checkpoint.mdl"
    match kind:
        case "truncated":
            save({"weight": torch.randn(256, 64)}, path)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "foreign":
            path.write_text("weights, but as text")
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "pickle":
            path.write_bytes(b"\x80\x02c__builtin__\neval\n.")
        case "another H5 file":
            with h5py.File(path, "w") as file:
                file["weights"] = [1.0, 2.0]
    with pytest.raises(error, match=f"(?s){text}") as caught:
        load(path)
    assert str(path) in str(caught.value)

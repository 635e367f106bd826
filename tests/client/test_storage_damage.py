"""Damaged checkpoints: what is loaded is what was saved, or the file is refused by name. HDF5 alone would hang."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cerebras_pytorch.saver.pt_h5_saver import PyTorchH5Saver
from test_storage_formats import SAMPLES, TREE, write_format_0_4

from cstorch._internal.checkpoint_files import structure, walk
from cstorch.errors import CheckpointError
from cstorch.storage import load, save

SCRIPT = Path(__file__).parent / "damaged_checkpoints.py"


def write_ours(path: Path) -> None:
    layers = {f"layer{number}.weight": torch.randn(20, 20) for number in range(20)}
    save({"model": layers, "lr": 0.1, "betas": [0.9, 0.99], "array": np.arange(600), "zeros": torch.zeros(3)}, path)


# How many bits are flipped in turn, and to how many sizes the file is cut.
DAMAGE = {"ours": (100, 100), "of release 2.10": (60, 20), "of format 0.4": (60, 20)}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """What becomes of each damaged file, by kind. One process is for all kinds, as it imports torch for seconds."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = {kind: folder / str(number) / "a.mdl" for number, kind in enumerate(DAMAGE)}
    for path in paths.values():
        path.parent.mkdir()
    write_ours(paths["ours"])
    paths["of release 2.10"].write_bytes((SAMPLES / "format_0_5.mdl").read_bytes())
    write_format_0_4(paths["of format 0.4"], TREE)
    command = [sys.executable, str(SCRIPT)]
    for kind, (flips, cuts) in DAMAGE.items():
        command += [str(paths[kind]), str(flips), str(cuts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return {
        kind: dict(line.rsplit(": ", 1) for line in lines if line.startswith(f"{path}: "))
        for kind, path in paths.items()
    }


@pytest.mark.cluster
@pytest.mark.timeout(300)  # hundreds of damaged files, each in a process of its own
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damaged_file_is_refused_by_name_or_loads(damaged: Mapping[str, Mapping[str, str]], kind: str) -> None:
    outcomes = damaged[kind]
    assert len(outcomes) > sum(DAMAGE[kind])
    counted = Counter(outcomes.values())
    # Only our files have checksums of all that is in them.
    allowed = {"equal", "refused"} if kind == "ours" else {"equal", "refused", "different"}
    assert counted.keys() <= allowed, [line for line in outcomes.items() if line[1] not in allowed]
    assert counted["refused"] > 20


@pytest.fixture
def looping(tmp_path: Path) -> Path:
    """A checkpoint in which HDF5 loops for ever: its strings are in a heap, of which the first entry has no length."""
    path = tmp_path / "a.mdl"
    write_ours(path)
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    content[heap + 16 : heap + 4096] = bytes(4096 - 16)
    path.write_bytes(content)
    return path


@pytest.mark.cluster
def test_a_file_in_which_hdf5_loops_is_refused(looping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_SECONDS_PER_OBJECT", 0.5)
    with pytest.raises(CheckpointError, match=rf"(?s){looping}.*did not finish reading"):
        load(looping)
    with pytest.raises(CheckpointError, match="did not finish reading"):
        PyTorchH5Saver.extract_version(looping)
    assert not PyTorchH5Saver.is_valid_checkpoint(looping)


@pytest.mark.cluster
def test_a_file_that_hdf5_crashes_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text("import os\nos.abort()\n")
    write_format_0_4(tmp_path / "a.mdl", TREE)
    monkeypatch.setattr(walk, "__file__", str(crash))
    with pytest.raises(CheckpointError, match=r"a\.mdl.*exit status -6"):
        load(tmp_path / "a.mdl")


def test_what_was_saved_loads_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(path: Path) -> None:
        raise AssertionError("the checksum of the structure was not used")

    monkeypatch.setattr(structure, "_walk", never)
    write_ours(tmp_path / "a.mdl")
    assert load(tmp_path / "a.mdl")["model"]["layer3.weight"].shape == (20, 20)
    save({}, tmp_path / "b.mdl")
    assert load(tmp_path / "b.mdl") == {}


def test_the_bytes_of_tensors_do_not_belong_to_the_structure(tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    save({"weight": torch.zeros(500, 500), "nothing": torch.zeros(0)}, path)
    with h5py.File(path) as file:
        start = file["weight"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[start + 1000] ^= 1
    path.write_bytes(content)
    assert structure._is_as_written(path)
    content[start - 1] ^= 1
    path.write_bytes(content)
    assert not structure._is_as_written(path)


@pytest.mark.cluster
def test_a_file_that_was_changed_with_h5py_loads(tmp_path: Path) -> None:
    write_ours(tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl", "a") as file:
        file.attrs["comment"] = "evaluated"
    assert not structure._is_as_written(tmp_path / "a.mdl")
    assert load(tmp_path / "a.mdl")["lr"] == 0.1


@pytest.mark.parametrize("shape", [[-1, 4], [2.0], [1 << 40, 1 << 40], "23"])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path: Path, shape: object) -> None:
    with h5py.File(tmp_path / "a.mdl", "w") as file:
        save({"a": 1}, tmp_path / "b.mdl")
        with h5py.File(tmp_path / "b.mdl") as whole:
            file.attrs.update(whole.attrs)
        entry = {"__TYPE__": "DeferredFullTensor", "dtype": "torch.float32", "shape": shape, "fill_value": 0}
        file.attrs["a.__metadata__"] = json.dumps({"a.__metadata__": entry})
    with pytest.raises(CheckpointError, match="of shape"):
        load(tmp_path / "a.mdl")

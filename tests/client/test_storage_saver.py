"""The saver of releases 2.0 and 2.1."""

from pathlib import Path

import pytest
import torch
from cerebras_pytorch.saver.pt_h5_saver import PyTorchH5Saver

from cerebras_pytorch import saver


def test_a_saver_is_save_and_load_with_names(tmp_path: Path) -> None:
    own = saver.PyTorchH5Saver()
    own.save(tmp_path / "a.mdl", {"model": {"fc.weight": torch.ones(2)}, "step": 3})
    assert own.load(tmp_path / "a.mdl")["model"]["fc.weight"].tolist() == [1, 1]
    assert PyTorchH5Saver.tensor_names(tmp_path / "a.mdl") == ["model.fc.weight", "step"]
    assert own.load_tensor(tmp_path / "a.mdl", "model.fc.weight").tolist() == [1, 1]
    assert own.load_tensor(tmp_path / "a.mdl", "step") == 3
    with pytest.raises(KeyError):
        own.load_tensor(tmp_path / "a.mdl", "model")
    version = PyTorchH5Saver.extract_version(tmp_path / "a.mdl")
    assert version is not None
    assert version == version.ckpt_version == 0.5
    torch.save({}, tmp_path / "pickled.pt")
    assert PyTorchH5Saver.extract_version(tmp_path / "pickled.pt") is None
    torch.save({}, tmp_path / "b.pt")
    (tmp_path / "c.mdl").write_bytes((tmp_path / "a.mdl").read_bytes()[:1000])
    valid = [PyTorchH5Saver.is_valid_checkpoint(path) for path in (None, "x", tmp_path / "b.pt", tmp_path / "c.mdl")]
    assert valid == [False] * 4
    assert PyTorchH5Saver.is_valid_checkpoint(tmp_path / "a.mdl")

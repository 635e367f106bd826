"""The values of a step in the record of a checked run."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cstorch._internal.check.run import MOST_ELEMENTS, sample


def test_tied_weights_in_float64_are_recorded(tmp_path: Path) -> None:
    weight = torch.arange(4.0, dtype=torch.float64)
    save_file({"tokens": sample(weight), "head": sample(weight)}, tmp_path / "values")
    assert all(torch.equal(tensor, weight) for tensor in load_file(tmp_path / "values").values())


def test_large_tensors_are_sampled_at_equal_distances() -> None:
    values = sample(torch.arange(2.0 * MOST_ELEMENTS).reshape(2, -1))
    assert torch.equal(values, torch.arange(0, 2 * MOST_ELEMENTS, 2, dtype=torch.float64))

"""Batches that wafers cannot take are refused with a way out."""

import errno
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from user_script import Script

import cstorch
from cstorch._internal.artifacts import make_artifact_dir, writes_in
from cstorch.errors import ConfigurationError, InputError
from cstorch.utils.data import DataExecutor, DataLoader


@dataclass
class Fields:
    x: Any


@dataclass(slots=True)
class Slots:
    x: Any


class Items(dict[str, Any]):
    """A dict of a script's class, for which pytree takes it as a leaf."""


REFUSED: dict[str, tuple[Any, str]] = {
    "an object with fields": (Fields(torch.ones(4, 2)), r"has an object of Fields, .*`vars\(batch\)`.*a dataclass"),
    "a dict's subclass": (Items(x=torch.ones(4, 2)), r"has an object of Items, .*`dict\(batch\)`"),
    "arrays": ({"x": np.ones((4, 2))}, r"yields dict, in which no tensor is found.*torch\.as_tensor"),
    "a scalar": (torch.tensor(1.0), "has no dimensions"),
    "complex": ({"x": torch.ones(4, 2), "y": torch.ones(4, dtype=torch.complex64)}, r"at \['y'\] .*view_as_real"),
    "int8": ({"x": torch.ones(4, 2), "labels": torch.ones(4).char()}, r"at \['labels'\] .* torch\.int8, .*long\(\)"),
    "uint16": ([torch.ones(4, 2), torch.ones(4, dtype=torch.uint16)], r"at \[1\] a tensor of torch\.uint16.*long\(\)"),
    "uint32": (torch.ones(4, dtype=torch.uint32), r"has a tensor of torch\.uint32.*long\(\)"),
    "uint64": ({"x": torch.ones(4, dtype=torch.uint64)}, r"at \['x'\] a tensor of torch\.uint64.*long\(\)"),
    "float8": ({"x": torch.ones(4).to(torch.float8_e5m2)}, r"at \['x'\] a tensor of torch\.float8_e5m2.*float\(\)"),
    "quantized": (torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8), r"qint8.*dequantize\(\)"),
    "on a device": (
        [torch.ones(4, 2), torch.ones(4, device="meta")],
        r"at \[1\] a tensor on the device 'meta'.*`\.to\(device",
    ),
    **{
        f"{type(hidden).__name__} in a dict": (
            {"x": torch.ones(4, 2), "hidden": hidden},
            rf"at \['hidden'\] an object of {type(hidden).__name__}, whose tensors .*namedtuple",
        )
        for hidden in (
            Fields([{"y": torch.ones(4, 2)}]),
            Slots(torch.ones(4, 2)),
            Items(y=torch.ones(4, 2)),
            UserDict(y=torch.ones(4, 2)),
            SimpleNamespace(y=torch.ones(4, 2)),
        )
    },
    "sparse": ([torch.ones(4, 2).to_sparse()], r"at \[0\] a sparse tensor.*to_dense"),
}


@pytest.mark.parametrize("num_csx", [1, 2])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_batch_that_cannot_be_taken_is_refused(tmp_path: Path, kind: str, num_csx: int) -> None:
    batch, message = REFUSED[kind]
    script = Script(tmp_path, num_csx=num_csx)
    with pytest.raises(InputError, match=message):
        script.loop(lambda _: None, [batch])


def test_an_empty_loader_is_named_as_the_cause(tmp_path: Path) -> None:
    Script(tmp_path)
    with pytest.raises(ConfigurationError, match="the loader of the input_fn is empty"):
        DataExecutor(DataLoader(list))


def test_a_folder_that_cannot_be_made_is_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/folder.*: Not a directory\. Name another .*artifact_dir"):
        make_artifact_dir(tmp_path / "file/folder")


def test_a_schedule_of_functions_refuses_one_as_its_first_value(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with pytest.raises(TypeError, match=r"LambdaLR takes the first value as a number.*`set_value_lambda`"):
        cstorch.optim.lr_scheduler.LambdaLR(script.optimizer, lambda epoch: 0.9**epoch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LambdaLR takes .*not <function .*its functions from `set_value_lambda`"):
        cstorch.optim.lr_scheduler.LambdaLR(script.optimizer, 0.1, lambda epoch: 0.9**epoch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="param_group_tags takes a tag of the optimizer's groups, or a list"):
        cstorch.optim.lr_scheduler.ConstantLR(script.optimizer, 0.1, param_group_tags=3)  # type: ignore[arg-type]


def test_a_write_that_fails_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    message = rf"{tmp_path} .*No space left on device\. Name another .*artifact_dir"
    with pytest.raises(ConfigurationError, match=message), writes_in(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")

"""Files of the real system: one of format 0.5 that release 2.10 has written, and one of 0.4 as it is described."""

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import pytest
import torch

from cstorch.errors import CheckpointError
from cstorch.storage import load, save

SAMPLES = Path(__file__).parent / "samples"
# The tree below, as dill 0.3.8 pickles the TreeSpec that torch 2.4 makes of it.
TREE = (
    "80049599020000000000008c13746f7263682e7574696c732e5f707974726565948c0854726565537065639493942981947d"
    "94288c0474797065948c0a64696c6c2e5f64696c6c948c0a5f6c6f61645f747970659493948c046469637494859452948c07"
    "636f6e74657874945d94288c056d6f64656c948c096f7074696d697a6572948c046e616d65948c046e6f6e65948c066f626a"
    "656374948c0468616c66948c03612f6294658c0e6368696c6472656e5f7370656373945d942868022981947d942868058c0b"
    "636f6c6c656374696f6e73948c0b4f72646572656444696374949394680c5d94288c0966632e776569676874948c0766632e"
    "62696173946568155d942868008c084c656166537065639493942981947d942868054e680c4e68155d948c096e756d5f6e6f"
    "646573944b018c0a6e756d5f6c6561766573944b018c0c6e756d5f6368696c6472656e944b00756268226568254b0368264b"
    "0268274b02756268022981947d94286805680b680c5d94288c057374617465948c0c706172616d5f67726f75707394656815"
    "5d942868022981947d94286805680b680c5d944b006168155d9468022981947d94286805680b680c5d948c04737465709461"
    "68155d9468226168254b0268264b0168274b0175626168254b0368264b0168274b01756268022981947d9428680568088c04"
    "6c6973749485945294680c4e68155d9468022981947d94286805680b680c5d94288c026c72948c056265746173946568155d"
    "9428682268022981947d9428680568088c057475706c659485945294680c4e68155d9428682268226568254b0368264b0268"
    "274b0275626568254b0568264b0368274b0275626168254b0668264b0368274b0175626568254b0a68264b0468274b027562"
    "682268226822682268226568254b1368264b0b68274b0775622e"
)
LEAVES: dict[str, tuple[str, np.ndarray[Any, Any] | None, dict[str, object]]] = {
    "model.fc.weight": ("TorchTensorH5Type", np.arange(6, dtype=np.float32).reshape(2, 3), {}),
    "model.fc.bias": ("TorchTensorH5Type", np.array([16256, -16384], dtype=np.int16), {"is_bfloat16": True}),
    "optimizer.state.0.step": ("TorchTensorH5Type", np.array(3), {}),
    "optimizer.param_groups.0.lr": ("ScalarH5Type", np.array(0.5), {}),
    "optimizer.param_groups.0.betas.0": ("ScalarH5Type", np.array(0.25), {}),
    "optimizer.param_groups.0.betas.1": ("ScalarH5Type", np.array(1), {}),
    "name": ("StringH5Type", None, {"string_value": "run"}),
    "none": ("NoneH5Type", None, {}),
    "object": ("ObjectH5Type", None, {"object_value": pickle.dumps(print).hex()}),
    "half": ("NumpyArrayH5Type", np.array([1.5]), {}),
    "a/b": ("TorchTensorH5Type", np.array([True, False]), {}),
}


def write_format_0_4(path: Path, tree: str) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["__version__"] = 0.4
        file.attrs["__spec__"] = tree
        for key, (kind, value, attributes) in LEAVES.items():
            name = quote(key, safe="")
            if value is None:
                dataset = file.create_dataset(name, data=h5py.Empty("f"))
            else:
                dataset = file.create_dataset(name, data=value, **({"compression": "gzip"} if value.ndim else {}))
            dataset.attrs["__H5_TYPE__"] = kind
            for attribute, content in attributes.items():
                dataset.attrs[attribute] = content


def test_a_file_of_release_2_10() -> None:
    tree = load(SAMPLES / "format_0_5.mdl")
    model = tree["model"]
    assert type(model) is OrderedDict
    assert torch.equal(model["fc1.weight"], torch.arange(12.0).reshape(3, 4))
    assert model["fc1.weight"] is model["fc1.tied"]
    assert tree["optimizer"]["state"][0]["step"].item() == 3
    assert tree["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0], "betas": (0.9, 0.99)}]
    assert (tree["half"].dtype, tree["half"].shape, tree["empty"].shape) == (torch.bfloat16, (5, 2), (0, 3))
    assert tree["bool"].tolist() == [True, False]
    np.testing.assert_array_equal(tree["array"], np.arange(6, dtype=np.int32).reshape(2, 3))
    assert torch.equal(tree["full"], torch.full((3, 4), 1.5))
    assert [tree[key] for key in ("step", "flag", "name", "nothing")] == [7, True, "run", None]


def test_our_files_describe_leaves_as_that_file_does(tmp_path: Path) -> None:
    save(load(SAMPLES / "format_0_5.mdl"), tmp_path / "a.mdl")
    with h5py.File(SAMPLES / "format_0_5.mdl") as real, h5py.File(tmp_path / "a.mdl") as ours:
        assert ours.attrs.keys() == real.attrs.keys()
        for name in real.attrs.keys() - {"__cstorch_version__"}:
            theirs, mine = real.attrs[name], ours.attrs[name]
            if isinstance(theirs, str):
                theirs, mine = json.loads(theirs), json.loads(mine)
            assert mine == theirs, name
        for name in real:
            for attribute, value in real[name].attrs.items():
                np.testing.assert_array_equal(ours[name].attrs[attribute], value)


def test_format_0_4_comes_back_as_the_tree_that_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_format_0_4(tmp_path / "a.mdl", TREE)
    tree = load(tmp_path / "a.mdl")
    assert type(tree["model"]) is OrderedDict
    assert torch.equal(tree["model"]["fc.weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tree["model"]["fc.bias"], torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert tree["optimizer"]["param_groups"] == [{"lr": 0.5, "betas": (0.25, 1)}]
    assert tree["optimizer"]["state"][0]["step"].item() == 3
    assert (tree["name"], tree["none"], tree["object"], tree["half"][0]) == ("run", None, None, 1.5)
    assert tree["a/b"].tolist() == [True, False]
    assert "pickled objects" in caplog.text
    assert "object" in caplog.text


@pytest.mark.parametrize("tree", [pickle.dumps(print).hex(), "not a pickle", pickle.dumps({}).hex()])
def test_format_0_4_with_a_tree_that_cannot_be_read_safely(tmp_path: Path, tree: str) -> None:
    write_format_0_4(tmp_path / "a.mdl", tree)
    loaded = load(tmp_path / "a.mdl")
    assert loaded["model"]["fc"]["weight"].sum().item() == 15
    assert loaded["optimizer"]["param_groups"]["0"]["betas"] == {"0": 0.25, "1": 1}


def test_a_tree_that_names_what_would_be_imported_is_refused(tmp_path: Path) -> None:
    leaf: dict[str, object] = {"type": None, "context": None, "children_spec": []}
    nodes: list[dict[str, object]] = [
        {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "os:x", "name": "y"}]'},
        {"type": "builtins.dict", "context": r'[{"\u005f_enum__": true, "fqn": "os:x", "name": "y"}]'},
        {
            "type": "collections.defaultdict",
            "context": {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": ["a"]},
        },
        {"type": "other.Node", "context": "null"},
    ]
    save({"a": 1}, tmp_path / "a.mdl")
    for node in nodes:
        text = json.dumps([1, {**node, "children_spec": [leaf]}])
        with h5py.File(tmp_path / "a.mdl", "a") as file:
            file.attrs["__spec__"] = json.dumps([None, text])
        with pytest.raises(CheckpointError, match="which is not loaded"):
            load(tmp_path / "a.mdl")

"""Writing a checkpoint: tensor by tensor to a temporary name, made durable, then given its name."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import torch
from torch.utils import _pytree as pytree

from cstorch.storage import layout
from interconnect.version import __version__


def save(state_dict: Any, ckpt_path: str | os.PathLike[str]) -> None:
    """Saves a tree of tensors, numpy arrays and Python scalars as an H5 checkpoint.

    Nothing appears under `ckpt_path` until the whole file is on disk. Tensors that live on the cluster are fetched one
    at a time. Tensors that occur twice in the tree are stored once.

    Raises:
        FileExistsError: there is a file at `ckpt_path`; checkpoints are never overwritten.
        TypeError: a leaf has a type that a checkpoint cannot hold.
        ValueError: two leaves have the same key.
    """
    target = Path(ckpt_path)
    if target.exists():
        raise FileExistsError(
            f"{target} exists; checkpoints are never overwritten: choose another name or remove it first"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        # libver: attributes of more than 64 kB (the tree of a large model) need the newer layout.
        with h5py.File(temporary, "x", libver="latest") as file:
            _write_tree(file, state_dict)
            file.flush()
            file.attrs[layout.SUCCESS] = True
        _sync(temporary)
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _write_tree(file: h5py.File, obj: Any) -> None:
    leaves, spec = pytree.tree_flatten_with_path(obj)
    file.attrs[layout.VERSION] = layout.FORMAT_VERSION
    file.attrs[layout.WRITER_VERSION] = __version__
    file.attrs[layout.SPEC] = json.dumps([_skeleton(obj), pytree.treespec_dumps(spec)])
    first_key: dict[int, str] = {}
    seen: set[str] = set()
    for path, leaf in leaves:
        key = layout.key_of(path)
        if key in seen:
            raise ValueError(f"two entries of the saved tree have the key {key!r}; rename one of them")
        seen.add(key)
        linked = first_key.setdefault(id(leaf), key) if isinstance(leaf, torch.Tensor | np.ndarray) else key
        entry = {"key": linked, layout.LINKED: True} if linked != key else _write_leaf(file, key, leaf)
        described = {layout.SPEC: ["*", None], layout.OBJECTS: [key], key + layout.METADATA: entry}
        file.attrs[key + layout.METADATA] = json.dumps(described)


def _skeleton(obj: Any) -> Any:
    """The tree with "*" for its leaves; None where JSON cannot hold it."""
    if isinstance(obj, dict):
        if not all(isinstance(key, str) for key in obj):
            return None
        return {key: _skeleton(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_skeleton(value) for value in obj]
    return "*"


def _write_leaf(file: h5py.File, key: str, leaf: Any) -> dict[str, Any]:
    match leaf:
        case None:
            return {layout.TYPE: "NoneSerializer", "__NONE__": True}
        case bool() | int() | float():
            return {layout.TYPE: "ScalarSerializer", "scalar_value": leaf}
        case str():
            return {layout.TYPE: "StringSerializer", "string_value": leaf}
        case torch.Tensor():
            return _write_tensor(file, key, leaf)
        case np.ndarray():
            _write_dataset(file, key, leaf, layout.ARRAY).attrs["is_bfloat16"] = False
            return {layout.TYPE: layout.ARRAY, "is_bfloat16": False}
    raise TypeError(
        f"a checkpoint cannot hold {key!r}: {type(leaf).__name__} is not a tensor, a numpy array, a number, a string "
        "or None"
    )


def _write_tensor(file: h5py.File, key: str, tensor: torch.Tensor) -> dict[str, Any]:
    stored = layout.STORED_TYPES.get(tensor.dtype)
    if stored is None:
        names = ", ".join(sorted(layout.TORCH_TYPES))
        raise TypeError(f"a checkpoint cannot hold {key!r} of type {tensor.dtype}; cast it to one of {names}")
    dataset = _write_dataset(file, key, layout.to_array(tensor.detach().cpu()), layout.TENSOR)
    dataset.attrs["__TORCH__"] = True
    dataset.attrs["shapes"] = json.dumps([list(tensor.shape)])
    dataset.attrs["dtypes"] = json.dumps([str(tensor.dtype)])
    dataset.attrs["rtfx_dtypes"] = json.dumps([stored.code])
    return {layout.TYPE: layout.TENSOR}


def _write_dataset(file: h5py.File, key: str, array: np.ndarray[Any, Any], kind: str) -> h5py.Dataset:
    # H5 knows no filters for scalars and for empty datasets.
    compressed = array.ndim > 0 and array.size > 0
    dataset = file.create_dataset(key, data=array, **(hdf5plugin.LZ4() if compressed else {}))
    dataset.attrs["__NUMPY__"] = True
    dataset.attrs[layout.TYPE] = kind
    dataset.attrs["compressed"] = compressed
    dataset.attrs[layout.CHECKSUM] = layout.checksum(array)
    return dataset


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Reading a checkpoint back, with nothing believed that the file cannot show."""

import json
import os
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers the LZ4 filter with h5py
import numpy as np
import torch
from torch.utils import _pytree as pytree

from cstorch.errors import CheckpointError
from cstorch.storage import layout


def load(ckpt_path: str | os.PathLike[str], map_location: str | torch.device | None = None) -> Any:
    """Loads what `save` wrote: the same tree, with CPU tensors.

    Args:
        ckpt_path: an H5 checkpoint.
        map_location: None or "cpu" gives plain CPU tensors, which torch.save writes as an ordinary PyTorch file;
            another device moves them there.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is no checkpoint, is partially written or damaged, or holds pickled objects.
    """
    source = Path(ckpt_path)
    if not source.exists():
        raise FileNotFoundError(f"there is no checkpoint {source}")
    if not h5py.is_hdf5(source):
        raise CheckpointError(f"{source} is not an H5 checkpoint; a file that torch.save wrote is read by torch.load")
    try:
        with h5py.File(source, "r") as file:
            tree = _Reader(source, file).tree()
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source} cannot be read: it is truncated or damaged ({error})") from None
    if map_location in (None, "cpu", "cache"):
        return tree
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), tree)


class _Reader:
    def __init__(self, path: Path, file: h5py.File) -> None:
        self._path = path
        self._file = file
        self._leaves: dict[str, Any] = {}

    def tree(self) -> Any:
        attributes = self._file.attrs
        if layout.VERSION not in attributes or layout.SPEC not in attributes:
            raise CheckpointError(f"{self._path} is an H5 file, but not a checkpoint that cstorch.save wrote")
        version = float(attributes[layout.VERSION])
        if version != layout.FORMAT_VERSION:
            raise CheckpointError(
                f"{self._path} has checkpoint format {version}; this version reads format {layout.FORMAT_VERSION}"
            )
        if not attributes.get(layout.SUCCESS, False):
            raise CheckpointError(f"{self._path} is partially written: the save that made it did not finish")
        spec = pytree.treespec_loads(json.loads(attributes[layout.SPEC])[1])
        positions = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        keys = [layout.key_of(path) for path, _ in pytree.tree_flatten_with_path(positions)[0]]
        return pytree.tree_unflatten([self._leaf(key) for key in keys], spec)

    def _leaf(self, key: str) -> Any:
        if key not in self._leaves:
            self._leaves[key] = self._read(key)
        return self._leaves[key]

    def _read(self, key: str) -> Any:
        described = self._file.attrs.get(key + layout.METADATA)
        if described is None:
            raise CheckpointError(f"{self._path} is damaged: {key!r} is missing")
        entry = json.loads(described)[key + layout.METADATA]
        if entry.get(layout.LINKED):
            if entry["key"] == key:
                raise CheckpointError(f"{self._path} is damaged: {key!r} is an alias of itself")
            return self._leaf(entry["key"])
        if entry.get("__NONE__"):
            return None
        for value in ("scalar_value", "string_value"):
            if value in entry:
                return entry[value]
        if entry[layout.TYPE] in (layout.TENSOR, layout.ARRAY):
            return self._dataset(key)
        raise CheckpointError(
            f"{self._path} holds {key!r} as {entry[layout.TYPE]}, which is a pickled object; it is not loaded, "
            "because unpickling runs code from the file"
        )

    def _dataset(self, key: str) -> Any:
        if key not in self._file:
            raise CheckpointError(f"{self._path} is damaged: the data of {key!r} are missing")
        dataset = self._file[key]
        array = np.asarray(dataset[()])
        expected = dataset.attrs.get(layout.CHECKSUM)
        if expected is not None and layout.checksum(array) != expected:
            raise CheckpointError(
                f"{self._path} is damaged: the data of {key!r} do not have the checksum they were saved with"
            )
        if dataset.attrs[layout.TYPE] == layout.ARRAY:
            return array
        dtype = layout.TORCH_TYPES[json.loads(dataset.attrs["dtypes"])[0]]
        return layout.to_tensor(array, dtype).reshape(json.loads(dataset.attrs["shapes"])[0])

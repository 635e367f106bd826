"""Loading a checkpoint: which kind of file it is, and where its tensors go."""

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import torch
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files.dataset import Dataset
from cstorch._internal.checkpoint_files.deferred import Content, DeferredTensor, Filled, Source
from cstorch._internal.checkpoint_files.h5 import read_h5
from cstorch._internal.checkpoint_files.safetensors_file import Entry, is_safetensors, read_safetensors
from cstorch.errors import CheckpointError

MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def load(ckpt_path: str | os.PathLike[str], map_location: MapLocation = None, **kwargs: Any) -> Any:
    """Loads a checkpoint: what `save` wrote, or a PyTorch or safetensors file. The content says which it is.

    Leaves that were one tensor when they were saved are one tensor again. In a checkpoint of format 0.4, what was
    pickled is left out with a warning; see cstorch._internal.checkpoint_files.legacy for the tree that comes back.

    Args:
        ckpt_path: the file. It must stay unchanged until all that is used has been read.
        map_location: None: nothing is read until it is used, and then for each use anew; tensors know their shape and
            type. "cache": the same, but what was read stays in memory. "cpu": everything is read now. A device: the
            same, and moved there, one tensor after the other. A mapping: the device under "cpu". For a PyTorch file,
            what torch.load takes; it is mapped into memory unless a device is given.
        kwargs: for torch.load, if it is a PyTorch file. Only tensors and plain Python values are unpickled
            (weights_only=True) unless you say otherwise.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is no checkpoint, is partially written or damaged, or holds pickled objects. Also
            raised by the first use of a tensor, if its bytes are damaged or the file has changed since.
        TypeError: the map_location is a function, and the file none of PyTorch.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    path = Path(ckpt_path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    is_h5 = h5py.is_hdf5(path)
    if not is_h5 and not is_safetensors(path):
        return _read_pytorch(path, map_location, kwargs)
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    if callable(map_location):
        raise TypeError(f"{path} is no PyTorch file: its map_location is a device, 'cpu', 'cache' or None")

    made: dict[int, torch.Tensor] = {}

    def tensor_of(source: Source) -> torch.Tensor:
        if id(source) not in made:
            made[id(source)] = _tensor(source, map_location)
        return made[id(source)]

    return pytree.tree_map_only((Dataset, Entry, Filled), tensor_of, read_h5(path) if is_h5 else read_safetensors(path))


def _tensor(source: Source, map_location: str | torch.device | None) -> torch.Tensor:
    if map_location in (None, "cache"):
        return DeferredTensor(Content(source, keeps=map_location == "cache"))
    value = source.view()
    # A copy also where it stays: it does not need the file any more.
    return value.to(map_location, copy=True) if value.numel() else torch.empty_like(value, device=map_location)


def _read_pytorch(path: Path, map_location: MapLocation, kwargs: Mapping[str, Any]) -> Any:
    is_deferred = map_location in (None, "cache")
    settings = {"weights_only": True, "mmap": is_deferred and zipfile.is_zipfile(path), **kwargs}
    try:
        return torch.load(path, map_location="cpu" if is_deferred else map_location, **settings)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint: neither a whole file of cstorch.save or safetensors, nor one that torch.load "
            f"reads with weights_only=True ({error})"
        ) from None

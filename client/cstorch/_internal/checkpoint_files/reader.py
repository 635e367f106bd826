"""Loads a checkpoint of any kind: `load`."""

import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import h5py
import torch
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files.dataset import Dataset
from cstorch._internal.checkpoint_files.deferred import Content, DeferredTensor, Filled, Source
from cstorch._internal.checkpoint_files.h5 import read_h5
from cstorch._internal.checkpoint_files.safetensors_file import Entry, is_safetensors, read_safetensors
from cstorch._internal.log import SlowWork, logged_if_slow
from cstorch.errors import CheckpointError

_SOURCES: Final = (Dataset, Entry, Filled)

MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def load(ckpt_path: str | os.PathLike[str], map_location: MapLocation = None, **kwargs: Any) -> Any:
    """Loads a checkpoint: a file of `save`, of PyTorch, or of safetensors, whichever the content is.

    Leaves that were one tensor when they were saved are one tensor again. Pickled objects in a checkpoint of format 0.4
    become None, with a warning; a tree that cannot be read without running code becomes nested dicts.

    Args:
        ckpt_path: The file. It must stay unchanged until all used tensors are read.
        map_location: None: a tensor is read at each use; it has its shape and type before. "cache": the same, but a
            tensor that was read stays in memory. "cpu": all tensors are read now. A device: the same, and each tensor
            is moved there. A mapping: the device under "cpu". For a PyTorch file, the argument of torch.load; the file
            is mapped into memory unless a device is given.
        **kwargs: Arguments of torch.load, for a PyTorch file. By default only tensors and plain Python values are
            unpickled (weights_only=True).

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: The file is no checkpoint, is incomplete or damaged, or holds pickled objects. Also raised by
            the first use of a tensor, if its bytes are damaged or the file has changed since.
        TypeError: The map_location is a function, and the file is not of PyTorch.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    path = Path(ckpt_path)
    with logged_if_slow(f"Loading {path}") as work:
        return _load(path, map_location, kwargs, work)


def _load(path: Path, map_location: MapLocation, kwargs: Mapping[str, Any], work: SlowWork) -> Any:
    """Loads a checkpoint; arguments and errors are those of `load`."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a checkpoint; name a file in it")
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
            made[id(source)] = tensor = _tensor(source, map_location)
            work.add(tensor.nbytes)
        return made[id(source)]

    tree = read_h5(path) if is_h5 else read_safetensors(path)
    if map_location not in (None, "cache"):
        sources = {id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, _SOURCES)}
        work.expect(sum(math.prod(each.shape) * each.dtype.itemsize for each in sources.values()))
    return pytree.tree_map_only(_SOURCES, tensor_of, tree)


def _tensor(source: Source, map_location: str | torch.device | None) -> torch.Tensor:
    if map_location in (None, "cache"):
        return DeferredTensor(Content(source, keeps=map_location == "cache"))
    value = source.view()
    # A copy in any case, so that the tensor does not depend on the file.
    return value.to(map_location, copy=True) if value.numel() else torch.empty_like(value, device=map_location)


def _read_pytorch(path: Path, map_location: MapLocation, kwargs: Mapping[str, Any]) -> Any:
    is_deferred = map_location in (None, "cache")
    settings = {"weights_only": True, "mmap": is_deferred and zipfile.is_zipfile(path), **kwargs}
    try:
        return torch.load(path, map_location="cpu" if is_deferred else map_location, **settings)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        reason = "the file is empty" if not path.stat().st_size else f"{type(error).__name__}: {error}".rstrip(": ")
        raise CheckpointError(
            f"{path} is no checkpoint: neither a whole file of cstorch.save or safetensors, nor one that torch.load "
            f"reads with weights_only=True ({reason})"
        ) from None

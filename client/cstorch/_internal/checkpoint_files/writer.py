"""Writes a checkpoint, tensor by tensor: `save`."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import torch
import xxhash
from torch.utils import _pytree as pytree

from cstorch._internal.check.run import checked_run
from cstorch._internal.checkpoint_files import layout
from cstorch._internal.checkpoint_files.deferred import Filled, content_of
from cstorch._internal.checkpoint_files.structure import append_checksum
from cstorch._internal.checkpoint_files.temporary import Output, new_file
from cstorch._internal.checkpoint_files.tree import storable
from cstorch._internal.interrupts import deferred, interruptible
from cstorch._internal.log import SlowWork, logged_if_slow
from cstorch._internal.tracing import LazyTensor, check_known
from waferbox import __version__

# A leaf in the text of a tree.
_LEAF: Final[dict[str, Any]] = {"type": None, "context": None, "children_spec": []}


def save(state_dict: Any, ckpt_path: str | os.PathLike[str]) -> None:
    """Saves a tree of tensors, numpy arrays and Python scalars as an H5 checkpoint.

    The file appears under its path once it is whole and on disk. Tensors that live on the cluster are fetched one at a
    time. A tensor that occurs twice in the tree is stored once.

    Args:
        state_dict: The tree: dictionaries, lists and tuples of the leaves. Numpy scalars are loaded as Python numbers,
            and subclasses of dict, such as Counter, as dicts, except OrderedDict and a defaultdict of a built-in type.
        ckpt_path: The path of the new file. Its folder is made if need be.

    Raises:
        FileExistsError: There is a file at `ckpt_path`; checkpoints are never overwritten.
        OSError: The file cannot be written, for instance because the disk is full; nothing of it is left.
        TypeError: A leaf or a key has a type that a checkpoint cannot hold.
        ValueError: Two leaves have the same key, a key cannot be a name in the file, or the tree contains itself.

    Example:
        In a checkpoint closure::

            cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.mdl")

    Reference: release 2.10, `cerebras.pytorch`.
    """
    target = Path(ckpt_path)
    tree = storable(state_dict)
    if (run := checked_run()) is not None:
        run.saved(tree)
        target.unlink(missing_ok=True)  # a checked run sees no longer the user's file, which stays as it is
    if target.exists():
        raise FileExistsError(
            f"{target} exists; checkpoints are never overwritten: choose another name or remove it first"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with logged_if_slow(f"Saving {target}") as work, new_file(target) as output, deferred():
            work.expect(_stored_bytes(tree))
            # libver: attributes of more than 64 kB (the tree of a large model) need the layout of HDF5 1.8, and the
            # real system's library reads no newer one.
            with h5py.File(output, "w", libver=("v108", "v108")) as file:
                data = _write_tree(file, output, tree, work)
                file.flush()
                file.attrs[layout.SUCCESS] = True
            output.check()
            append_checksum(output.fileno(), data)
    except OSError as error:
        if error.errno is None:
            raise
        raise _not_saved(target, tree, error) from None


def _not_saved(target: Path, tree: Any, error: OSError) -> OSError:
    text = str(error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
            room = f"a file may have {limit / 1e6:.2f} MB (ulimit -f)"
        else:
            room = f"{shutil.disk_usage(target.parent).free / 1e6:.2f} MB are free"
        text += (
            f": the tensors of the checkpoint take {_stored_bytes(tree) / 1e6:.2f} MB, its file takes more, and {room}"
        )
    elif not target.is_absolute() and not os.path.exists(current := os.readlink("/proc/self/cwd")):
        folder = current.removesuffix(" (deleted)")  # Linux adds it to the path of a folder that was removed
        text = (
            f"the working directory {folder} does not exist any more; change to another one or save to an absolute path"
        )
    elif not target.parent.is_dir():
        text += f": {target.parent} is not a folder; choose another one"
    return OSError(error.errno, f"{text}. Nothing of it is left; earlier ones are as they were", str(target))


def _stored_bytes(tree: Any) -> int:
    """Returns the bytes of the tensors and arrays of a tree."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor | np.ndarray)]
    return sum({_identity(leaf): leaf.nbytes for leaf in leaves}.values())


def _write_tree(file: h5py.File, output: Output, tree: Any, work: SlowWork) -> list[tuple[int, int]]:
    """Writes all leaves; returns offset and length of the bytes of each tensor and array."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    file.attrs[layout.VERSION] = layout.FORMAT_VERSION
    file.attrs[layout.WRITER_VERSION] = __version__
    file.attrs[layout.SPEC] = json.dumps([_skeleton(tree), pytree.treespec_dumps(spec)])
    first_key: dict[object, str] = {}
    seen: set[str] = set()
    for path, leaf in leaves:
        key = layout.key_of(path)
        if key in seen:
            raise ValueError(f"two entries of the saved tree have the key {key!r}; rename one of them")
        seen.add(key)
        linked = first_key.setdefault(_identity(leaf), key) if isinstance(leaf, torch.Tensor | np.ndarray) else key
        entry = _write_leaf(file, key, leaf, work) if linked == key else _link_to(linked)
        output.check()
        node = {"type": "builtins.dict", "context": json.dumps([key]), "children_spec": [_LEAF]}
        described = {
            layout.SPEC: [{key: "*"}, json.dumps([1, node])],
            layout.OBJECTS: [key],
            key + layout.METADATA: entry,
        }
        file.attrs[key + layout.METADATA] = json.dumps(described)
    datasets = [found.id for key in first_key.values() if isinstance(found := file.get(key), h5py.Dataset)]
    return [(offset, each.get_storage_size()) for each in datasets if (offset := each.get_offset()) is not None]


def _identity(leaf: torch.Tensor | np.ndarray[Any, Any]) -> object:
    """Returns a key that is equal for leaves with the same memory, which are stored once and load as one tensor."""
    if isinstance(leaf, np.ndarray):
        return id(leaf)
    if isinstance(leaf, LazyTensor) and leaf._handle.cell is not None:
        meta = leaf._handle.meta
        return id(leaf._handle.cell), meta.dtype, meta.shape, meta.stride(), meta.storage_offset()
    if (content := content_of(leaf)) is not None:
        return id(content)
    if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided and leaf.numel():
        return leaf.data_ptr(), leaf.device, leaf.dtype, leaf.shape, leaf.stride()
    return id(leaf)


def _skeleton(obj: Any) -> Any:
    """Returns the tree with "*" for its leaves; None if JSON cannot hold it."""
    if isinstance(obj, dict):
        if not all(isinstance(key, str | int) for key in obj):
            return None
        return {key: _skeleton(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_skeleton(value) for value in obj]
    return "*"


def _without_data(kind: str, **fields: Any) -> dict[str, Any]:
    return {**fields, layout.TYPE: kind, layout.NO_DATA: True}


def _link_to(key: str) -> dict[str, Any]:
    return _without_data(layout.LINK, key=key) | {layout.LINKED: True}


def _write_leaf(file: h5py.File, key: str, leaf: Any, work: SlowWork) -> dict[str, Any]:
    match leaf:
        case None:
            return _without_data(layout.NONE)
        case bool() | int() | float():
            return _without_data(layout.SCALAR, scalar_value=leaf)
        case str():
            return _without_data(layout.STRING, string_value=leaf)
        case torch.Tensor():
            return _write_tensor(file, key, leaf, work)
    attributes = {"is_bfloat16": False, layout.TYPE: layout.ARRAY, layout.NUMPY: True, "compressed": False}
    _write_dataset(file, key, leaf.shape, leaf.dtype, [leaf], attributes, work)
    return attributes


def _write_tensor(file: h5py.File, key: str, tensor: torch.Tensor, work: SlowWork) -> dict[str, Any]:
    check_known(tensor)
    stored = layout.STORED_TYPES[tensor.dtype]
    shape = list(tensor.shape)
    value = _only_value(tensor)
    if value is not None:
        work.add(tensor.nbytes)
        return _without_data(layout.FULL, shape=shape, dtype=str(tensor.dtype), fill_value=value)
    attributes = {
        layout.TORCH: True,
        "shapes": [shape],
        "dtypes": [str(tensor.dtype)],
        "rtfx_dtypes": [stored.code],
        layout.TYPE: layout.TENSOR,
        layout.NUMPY: True,
        # Weights do not compress, and HDF5's filters take longer than the disk.
        "compressed": False,
    }
    _write_dataset(file, key, tensor.shape, stored.numpy, map(layout.to_array, _pieces(tensor)), attributes, work)
    return attributes


def _only_value(tensor: torch.Tensor) -> bool | int | float | None:
    """Returns the value of all elements of a tensor that is known to have one value; None for other tensors."""
    if isinstance(tensor, LazyTensor):
        cell = tensor._handle.cell
        is_zero = cell is not None and cell.is_untouched
        return torch.zeros((), dtype=tensor.dtype, device="cpu").item() if is_zero else None
    content = content_of(tensor)
    if content is not None and not content.is_read and isinstance(content.source, Filled):
        return content.source.value
    return None


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the value in CPU tensors along the first dimension, none of which stays in memory."""
    if isinstance(tensor, LazyTensor):
        cell, meta = tensor._handle.cell, tensor._handle.meta
        if cell is not None and (meta.shape, meta.dtype) == (cell.shape, cell.dtype) and meta.is_contiguous():
            yield from cell.pieces()
            return
    content = content_of(tensor)
    yield tensor.detach().cpu() if content is None else content.read()


def _write_dataset(
    file: h5py.File,
    key: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    pieces: Iterable[np.ndarray[Any, Any]],
    attributes: Mapping[str, Any],
    work: SlowWork,
) -> None:
    try:
        dataset = file.create_dataset(key, shape, dtype)
    except (TypeError, ValueError) as error:
        # For HDF5 a name is a path of folders: "a" and "a/b" cannot both be tensors, and "a//b" is "a/b".
        raise ValueError(
            f"a checkpoint cannot hold a tensor under the name {key!r}, alone or beside the others; rename it ({error})"
        ) from None
    checksum = xxhash.xxh3_64()
    row = 0
    for piece in interruptible(pieces):
        layout.add_to_checksum(checksum, piece)
        if not shape:
            dataset[()] = piece
        elif piece.size:
            dataset[row : row + len(piece)] = piece
            row += len(piece)
        work.add(piece.nbytes)
    for name, value in attributes.items():
        dataset.attrs[name] = value
    dataset.attrs[layout.CHECKSUM] = checksum.hexdigest()

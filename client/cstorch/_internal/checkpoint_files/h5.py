"""Reads a checkpoint in the H5 layout. All descriptions in the file are checked, and no name in it is imported."""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import torch
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files import layout, legacy
from cstorch._internal.checkpoint_files.dataset import Dataset, read_array
from cstorch._internal.checkpoint_files.deferred import Filled, Source, Unchanged
from cstorch._internal.checkpoint_files.structure import check_structure
from cstorch.errors import CheckpointError

# --- The tree ---------------------------------------------------------------------------------------------------------

# Nodes that torch makes from numbers and strings of the file alone.
_PLAIN = frozenset(
    {
        "builtins.dict",
        "builtins.list",
        "builtins.tuple",
        "collections.OrderedDict",
        "collections.deque",
        "torch.Size",
    }
)
_FACTORIES = frozenset(factory.__name__ for factory in layout.FACTORIES)


def read_treespec(text: str, path: Path) -> pytree.TreeSpec:
    """Returns the tree of a text that `torch.utils._pytree.treespec_dumps` made.

    Args:
        text: The text.
        path: The file, for errors.

    Raises:
        CheckpointError: The tree has a node of an unknown type.
        ValueError, TypeError, KeyError, IndexError: The text is damaged.
    """
    _check(json.loads(text)[1], path)
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path} holds a tree with a type that this process does not know: {error}. Register it before you load, "
            "as in the script that saved it"
        ) from None


def _check(node: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError for a node whose context torch would import: an enum, or the factory of a defaultdict."""
    kind, context = node["type"], node["context"]
    if kind == "collections.defaultdict":
        factory = (context["default_factory_module"], context["default_factory_name"])
        is_known = factory[0] == "builtins" and factory[1] in _FACTORIES
    elif kind is None or kind == "collections.namedtuple":
        is_known = True
    else:
        is_known = kind in _PLAIN and not _has_object(context)
    if not is_known:
        raise CheckpointError(f"{path} holds a tree with a node of type {kind}, which is not loaded")
    for child in node["children_spec"]:
        _check(child, path)


def _has_object(context: str) -> bool:
    """Whether a context, which is a JSON text, has an object: only an enum does."""
    found: list[Any] = []
    json.loads(context, object_hook=found.append)
    return bool(found)


# --- The leaves -------------------------------------------------------------------------------------------------------


def read_h5(path: Path) -> Any:
    """Returns the tree of an H5 checkpoint, with sources instead of tensors; the same tensor has the same source.

    Raises:
        CheckpointError: See load.
    """
    file_now = Unchanged.now(path)
    check_structure(path)
    try:
        with h5py.File(path, "r") as file:
            attributes = file.attrs
            if layout.VERSION not in attributes or layout.SPEC not in attributes:
                raise CheckpointError(f"{path} is an H5 file, but not a checkpoint that cstorch.save wrote")
            version = float(attributes[layout.VERSION])
            if version == legacy.FORMAT_VERSION:
                return legacy.read_legacy(file, file_now)
            if version != layout.FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has checkpoint format {version}; this version reads the formats {legacy.FORMAT_VERSION} "
                    f"and {layout.FORMAT_VERSION}"
                )
            if not attributes.get(layout.SUCCESS, False):
                raise CheckpointError(f"{path} is partially written: the save that made it did not finish")
            return _Reader(file_now, file).tree()
    except CheckpointError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: it is truncated or damaged ({error})") from None


class _Reader:
    """The reader of the leaves of one open file."""

    def __init__(self, file_now: Unchanged, file: h5py.File) -> None:
        self._now = file_now
        self._path = file_now.path
        self._file = file
        self._leaves: dict[str, Any] = {}

    def tree(self) -> Any:
        spec = read_treespec(json.loads(self._file.attrs[layout.SPEC])[1], self._path)
        positions = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        keys = [layout.key_of(path) for path, _ in pytree.tree_flatten_with_path(positions)[0]]
        return pytree.tree_unflatten([self._leaf(key) for key in keys], spec)

    def _leaf(self, key: str, followed: frozenset[str] = frozenset()) -> Any:
        if key not in self._leaves:
            self._leaves[key] = self._read(key, followed | {key})
        return self._leaves[key]

    def _read(self, key: str, followed: frozenset[str]) -> Any:
        text = self._file.attrs.get(key + layout.METADATA)
        if text is None:
            raise CheckpointError(f"{self._path} is damaged: {key!r} is missing")
        entry = json.loads(text)[key + layout.METADATA]
        match entry[layout.TYPE]:
            case layout.LINK:
                if entry["key"] in followed:
                    raise CheckpointError(f"{self._path} is damaged: {key!r} is an alias of itself")
                return self._leaf(entry["key"], followed)
            case layout.NONE:
                return None
            case layout.SCALAR:
                return entry["scalar_value"]
            case layout.STRING:
                return entry["string_value"]
            case layout.FULL:
                dtype = layout.TORCH_TYPES[entry["dtype"]]
                return Filled(shape=_shape(entry["shape"]), dtype=dtype, value=entry["fill_value"])
            case layout.TENSOR:
                return self._tensor(key, _shape(entry["shapes"][0]), layout.TORCH_TYPES[entry["dtypes"][0]])
            case layout.ARRAY if not entry["is_bfloat16"]:
                self._check_presence(key)
                return read_array(self._path, self._file[key])
            case layout.ARRAY:
                raise CheckpointError(f"{self._path} holds {key!r} as a numpy array of bfloat16, which is not loaded")
            case kind:
                raise CheckpointError(
                    f"{self._path} holds {key!r} as {kind}, which is a pickled object; it is not loaded, because "
                    "unpickling runs code from the file"
                )

    def _tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Source:
        self._check_presence(key)
        dataset = self._file[key]
        if dataset.dtype != layout.STORED_TYPES[dtype].numpy or dataset.size != math.prod(shape):
            raise CheckpointError(
                f"{self._path} is damaged: the data of {key!r} are of shape {dataset.shape} and type {dataset.dtype}, "
                f"not {shape} and {dtype}"
            )
        return Dataset.of(dataset, self._now, shape, dtype)

    def _check_presence(self, key: str) -> None:
        if key not in self._file:
            raise CheckpointError(f"{self._path} is damaged: the data of {key!r} are missing")


def _shape(sizes: list[int]) -> tuple[int, ...]:
    """Returns a shape; raises ValueError if no tensor can have it."""
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(sizes) >= 1 << 60:
        raise ValueError(f"a tensor of shape {sizes}")
    return tuple(sizes)

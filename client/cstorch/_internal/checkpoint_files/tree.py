"""The tree that a checkpoint holds, made of the object that is saved: `storable`."""

import json
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any, Final

import h5py
import numpy as np
import torch
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files import layout

# The levels of a tree that torch and JSON write and read without a RecursionError, whichever the containers.
_MOST_LEVELS: Final = 200

# The bytes of a leaf's key, which is part of the name of an attribute: HDF5 allows 64 kB with all that belongs to it.
_LONGEST_KEY: Final = 65_000

# The keys from the root to an entry.
_Path = tuple[object, ...]


def storable(obj: Any) -> Any:
    """Returns the tree that `load` will return for an object, with the object's own tensors and arrays.

    Subclasses of dict become dicts, except OrderedDict and a defaultdict of a built-in type; those of list become
    lists. Numpy scalars become Python numbers.

    Args:
        obj: The object to save.

    Raises:
        TypeError: An entry or a key has a type that a checkpoint cannot hold.
        ValueError: The tree contains itself or is too deep, or a name or a value cannot be stored.
    """
    return _storable(obj, (), ())


def _storable(obj: Any, path: _Path, containers: tuple[int, ...]) -> Any:
    """Returns the storable tree of an entry, which lies in the containers of these ids."""
    if not isinstance(obj, dict | list | tuple | deque):
        return _leaf(obj, path)
    if id(obj) in containers:
        raise ValueError(f"{_refusal(path)}: it contains itself. Remove this entry")
    if len(containers) == _MOST_LEVELS:
        raise ValueError(f"{_refusal(path)}: it lies more than {_MOST_LEVELS} levels deep. Save a flatter tree")
    containers = (*containers, id(obj))
    if isinstance(obj, dict):
        for key in obj:
            _check_key(key, path)
        return _dict_like(obj, {key: _storable(value, (*path, key), containers) for key, value in obj.items()})
    if isinstance(obj, tuple) and type(obj) not in (tuple, torch.Size) and not _is_registered_namedtuple(obj):
        raise TypeError(
            f"{_refusal(path)}: {type(obj).__name__} is a tuple of a class of its own, which the file cannot name. "
            "Convert it to a tuple, or a namedtuple to a dict with _asdict()"
        )
    names = obj._fields if _is_namedtuple(obj) else range(len(obj))  # type: ignore[union-attr]
    children = [_storable(value, (*path, name), containers) for name, value in zip(names, obj, strict=True)]
    if isinstance(obj, list):
        return children
    if isinstance(obj, deque):
        return deque(children, obj.maxlen)
    return type(obj)(*children) if _is_namedtuple(obj) else type(obj)(children)


def _dict_like(obj: dict[Any, Any], children: dict[Any, Any]) -> dict[Any, Any]:
    if type(obj) is OrderedDict:
        return OrderedDict(children)
    if type(obj) is defaultdict and obj.default_factory in layout.FACTORIES:
        return defaultdict(obj.default_factory, children)
    return children


def _is_namedtuple(obj: object) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def _is_registered_namedtuple(obj: tuple[Any, ...]) -> bool:
    """Whether the script has given the class of a namedtuple a name in files, by which `load` finds it."""
    if not _is_namedtuple(obj):
        return False
    try:
        pytree.treespec_dumps(pytree.tree_structure(type(obj)(*range(len(obj)))))
    except NotImplementedError:
        return False
    return True


def _refusal(path: _Path) -> str:
    """Returns the start of an error about an entry."""
    return f"a checkpoint cannot hold {_key(path)!r}" if path else "a checkpoint cannot hold this object"


def _key(path: _Path) -> str:
    return ".".join(map(str, path))


def _is_kept(value: object) -> bool:
    """Whether JSON, in which the file has keys and Python values, returns the same value. It has no tuples."""
    try:
        read = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return bool(read == value)


def _check_key(key: object, path: _Path) -> None:
    of = f" of {_key(path)!r}" if path else ""
    if isinstance(key, str) and ("\0" in key or any("\ud800" <= character <= "\udfff" for character in key)):
        raise ValueError(
            f"a checkpoint cannot hold the key {key!r}{of}: it has a NUL character or half of a surrogate pair. "
            "Rename it"
        )
    # The names of the leaves have the key as text: that of an enum with values of type str is not that of its value.
    if not _is_kept(key) or str(json.loads(json.dumps(key))) != str(key):
        raise TypeError(
            f"a checkpoint cannot hold the key {key!r}{of}: a key of type {type(key).__name__} would not be the same "
            "after load. Convert it to a string or a Python number, or save a list of pairs instead of the dict"
        )


def _leaf(leaf: Any, path: _Path) -> Any:
    if len(_key(path).encode()) > _LONGEST_KEY:
        raise ValueError(
            f"a checkpoint cannot hold an entry whose name has more than {_LONGEST_KEY} bytes. Rename "
            f"'{_key(path)[:40]}...'"
        )
    if isinstance(leaf, np.generic) and leaf.dtype.kind in "biuf":
        leaf = leaf.item()
    match leaf:
        case torch.Tensor():
            _check_tensor(leaf, path)
        case np.ndarray():
            _check_array(leaf, path)
        case None | bool() | float():
            pass
        case int() | str():
            if not _is_kept(leaf):
                raise ValueError(
                    f"{_refusal(path)}: its text would not be the same after load. Save a shorter number, or a string "
                    "without surrogates"
                )
        case _:
            raise TypeError(
                f"{_refusal(path)}: {type(leaf).__name__} is not a tensor, a numpy array, a number, a string or None, "
                f"nor a dict, list or tuple of them. {_advice(leaf)}"
            )
    return leaf


def _advice(leaf: object) -> str:
    if isinstance(leaf, Enum):
        return "Convert it to its value or its name"
    if isinstance(leaf, set | frozenset | range):
        return "Convert it to a list"
    if isinstance(leaf, torch.nn.Module):
        return "Convert it to a dict with state_dict()"
    return "Convert it to one of these, for instance to a string, or leave it out"


def _check_tensor(tensor: torch.Tensor, path: _Path) -> None:
    _check_named("tensor", path)
    if tensor.is_nested:
        raise TypeError(f"{_refusal(path)}: it is a nested tensor. Convert it to a list of tensors with unbind()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{_refusal(path)}: it is a tensor of layout {tensor.layout}. Convert it with to_dense()")
    if tensor.is_meta:
        raise TypeError(f"{_refusal(path)}: it is a meta tensor, which has no values. Give it values or leave it out")
    if tensor.dtype not in layout.STORED_TYPES:
        names = ", ".join(sorted(layout.TORCH_TYPES))
        raise TypeError(f"{_refusal(path)} of type {tensor.dtype}; cast it to one of {names}")


def _check_array(array: np.ndarray[Any, Any], path: _Path) -> None:
    _check_named("array", path)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{_refusal(path)}: it is a masked array. Convert it with filled(), or save data and mask")
    try:
        h5py.h5t.py_create(array.dtype, logical=True)
        is_storable = not array.dtype.hasobject
    except TypeError:
        is_storable = False
    if not is_storable:
        raise TypeError(
            f"{_refusal(path)}: it is a numpy array of type {array.dtype}. Convert it to an array of numbers, or to a "
            "list of numbers or strings"
        )


def _check_named(kind: str, path: _Path) -> None:
    if not path:
        raise TypeError(
            f"a checkpoint cannot hold a {kind} without a name. Save it in a dict, for instance {{'weight': {kind}}}"
        )

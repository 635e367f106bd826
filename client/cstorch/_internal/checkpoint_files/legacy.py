"""Reads checkpoints of format 0.4, of releases 2.0 to 2.2 of the real system.

Every leaf is a dataset; its name is the leaf's key, URL-quoted, and an attribute has its kind. The tree is a pickle. It
is read if all its nodes are dicts, lists and tuples, without running code of torch or of the file. Otherwise the result
is nested dicts: the key `model.fc1.weight` becomes `["model"]["fc1"]["weight"]`, and positions in lists become strings.
Pickled leaves become None.
"""

import io
import logging
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import h5py
import numpy as np
import torch

from cstorch._internal.checkpoint_files import layout
from cstorch._internal.checkpoint_files.dataset import Dataset
from cstorch._internal.checkpoint_files.deferred import Unchanged

logger = logging.getLogger("cstorch.storage")

FORMAT_VERSION: Final = 0.4
KIND: Final = "__H5_TYPE__"

_TORCH_TYPES: Final = {stored.numpy: dtype for dtype, stored in layout.STORED_TYPES.items() if dtype != torch.bfloat16}


def read_legacy(file: h5py.File, now: Unchanged) -> Any:
    """Returns the tree of a file of format 0.4, with sources instead of tensors. Raises errors of h5py."""
    leaves: dict[str, Any] = {}
    pickled: list[str] = []
    for name, dataset in file.items():
        key, kind = unquote(name), dataset.attrs[KIND]
        match kind:
            case "TorchTensorH5Type":
                is_bfloat16 = bool(dataset.attrs.get("is_bfloat16", False))
                dtype = torch.bfloat16 if is_bfloat16 else _TORCH_TYPES[dataset.dtype]
                leaves[key] = Dataset.of(dataset, now, dataset.shape, dtype)
            case "NumpyArrayH5Type":
                leaves[key] = np.asarray(dataset[()])
            case "ScalarH5Type":
                leaves[key] = np.asarray(dataset[()]).item()
            case "StringH5Type":
                leaves[key] = str(dataset.attrs["string_value"])
            case "NoneH5Type":
                leaves[key] = None
            case _:
                leaves[key] = None
                pickled.append(key)
    if pickled:
        logger.warning(
            "%s holds pickled objects, which are not loaded, because unpickling runs code from the file; None takes "
            "the place of %s",
            now.path,
            ", ".join(pickled),
        )
    tree = _tree_of(file.attrs[layout.SPEC])
    if tree is None or set(tree.keys()) != leaves.keys():
        logger.warning(
            "the tree of %s cannot be read without running code from the file: nested dicts, made from the names of "
            "the tensors, are returned instead",
            now.path,
        )
        return _nested(leaves)
    return tree.fill(leaves)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *parents, last = key.split(".")
        node = root
        for part in parents:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):  # `a` is a leaf, and so is `a.b`: the rest of the key stays whole
                break
            node = inner
        else:
            node[last] = leaf
            continue
        node[key] = leaf
    return root


class _Node:
    """A pickled TreeSpec of any release of torch."""

    type: Any = None
    context: Any = None
    children_specs: Any = ()

    def __setstate__(self, state: Any) -> None:
        fields = state[1] if isinstance(state, tuple) else state
        for name in ("type", "context", "children_specs"):
            setattr(self, name, fields[name])

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yields the keys of the leaves, in order."""
        for name, child in self._children():
            key = f"{prefix}.{name}" if prefix else str(name)
            if child.type is None:
                yield key
            else:
                yield from child.keys(key)

    def fill(self, leaves: Mapping[str, Any], prefix: str = "") -> Any:
        """Returns the tree with these leaves."""
        if self.type is None:
            return leaves[prefix]
        values = [
            (name, child.fill(leaves, f"{prefix}.{name}" if prefix else str(name))) for name, child in self._children()
        ]
        return self.type(values) if issubclass(self.type, dict) else self.type(value for _, value in values)

    def _children(self) -> Iterator[tuple[Any, "_Node"]]:
        if self.type not in (dict, OrderedDict, list, tuple) or not isinstance(self.children_specs, list | tuple):
            raise pickle.UnpicklingError(f"a tree with a node of type {self.type}")
        names = self.context if issubclass(self.type, dict) else range(len(self.children_specs))
        for name, child in zip(names, self.children_specs, strict=True):
            if not isinstance(child, _Node):
                raise pickle.UnpicklingError("a tree with something else than nodes")
            yield name, child


_TYPE_NAMES: Final = {"dict": dict, "list": list, "tuple": tuple}


def _load_type(name: str) -> type:
    """The function that dill calls for the name of a built-in type."""
    return _TYPE_NAMES[name]


class _TreeUnpickler(pickle.Unpickler):
    """An unpickler that loads no class or function except those of a tree."""

    _KNOWN: Final = {
        ("torch.utils._pytree", "TreeSpec"): _Node,
        ("torch.utils._pytree", "LeafSpec"): _Node,
        ("collections", "OrderedDict"): OrderedDict,
        ("dill._dill", "_load_type"): _load_type,
        **{("builtins", kind.__name__): kind for kind in (dict, list, tuple)},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"the tree names {module}.{name}")
        return self._KNOWN[module, name]


def _tree_of(text: str) -> _Node | None:
    try:
        tree = _TreeUnpickler(io.BytesIO(bytes.fromhex(text))).load()
        if isinstance(tree, _Node):
            list(tree.keys())
            return tree
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        pass
    return None

"""PyTorchH5Saver: `cstorch.save` and `cstorch.load` as methods, and one tensor of a checkpoint by its name."""

import os
import pathlib
from typing import Any

import h5py
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files import layout
from cstorch._internal.checkpoint_files.structure import check_structure
from cstorch.errors import CheckpointError
from cstorch.storage import load, save

Path = str | os.PathLike[str]


class FormatVersion(float):
    """The format of a checkpoint, as a number."""

    @property
    def ckpt_version(self) -> float:
        """The number, under the name of release 2.1."""
        return float(self)


class PyTorchH5Saver:
    """Saves and loads checkpoints. The name of a tensor is its path in the tree, joined with dots.

    Files are written whole and never changed, so there is no `save_tensor`.

    Args:
        **settings: Those of older releases; accepted without effect.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.saver`.
    """

    def __init__(self, **settings: Any) -> None:
        pass

    def save(self, ckpt_file: Path, state_dict: Any) -> None:
        """Saves a checkpoint, as `cstorch.save`, and raises the same errors.

        Args:
            ckpt_file: The path of the new file.
            state_dict: The tree.
        """
        save(state_dict, ckpt_file)

    def load(self, ckpt_file: Path, map_location: Any = None) -> Any:
        """Loads a checkpoint, as `cstorch.load`, and raises the same errors.

        Args:
            ckpt_file: The file.
            map_location: As for `cstorch.load`.
        """
        return load(ckpt_file, map_location)

    def load_tensor(self, ckpt_file: Path, tensor_name: str) -> Any:
        """Returns one leaf of the tree; the others are not read.

        Args:
            ckpt_file: The file.
            tensor_name: The name of the leaf.

        Raises:
            KeyError: There is none of this name.
        """
        return _leaves(ckpt_file)[tensor_name]

    @staticmethod
    def tensor_names(ckpt_file: Path) -> list[str]:
        """Returns the names of all leaves, in the order of the tree.

        Args:
            ckpt_file: The file.
        """
        return list(_leaves(ckpt_file))

    @staticmethod
    def extract_version(ckpt_file: Path) -> FormatVersion | None:
        """Returns the format of an H5 checkpoint; None for another file. Files of the first format have no number: 0.1.

        Args:
            ckpt_file: The file.
        """
        if not h5py.is_hdf5(ckpt_file):
            return None
        check_structure(pathlib.Path(ckpt_file))
        with h5py.File(ckpt_file, "r") as file:
            return FormatVersion(file.attrs.get(layout.VERSION, 0.1))

    @staticmethod
    def is_valid_checkpoint(file_path: Path | None) -> bool:
        """Whether a file is an H5 checkpoint that can be loaded. The tensors' bytes are not checked.

        Args:
            file_path: The file; None: False.
        """
        if file_path is None or not os.path.isfile(file_path) or not h5py.is_hdf5(file_path):
            return False
        try:
            load(file_path)
        except CheckpointError:
            return False
        return True


def _leaves(path: Path) -> dict[str, Any]:
    return _named(load(path))


def _named(tree: Any) -> dict[str, Any]:
    return {layout.key_of(keys): leaf for keys, leaf in pytree.tree_flatten_with_path(tree)[0]}


class CheckpointReader:
    """The tensors of a checkpoint by name, read when they are used. Raises as `cstorch.load`.

    Args:
        checkpoint_file: The file.
    """

    def __init__(self, checkpoint_file: Path) -> None:
        self._tree = load(checkpoint_file)

    @property
    def spec(self) -> Any:
        """The structure of the tree, for CerebrasStateDict."""
        return pytree.tree_structure(self._tree)

    @property
    def tensor_names(self) -> list[str]:
        """The names of all leaves, in the order of the tree."""
        return list(_named(self._tree))

    def __getitem__(self, tensor_name: str) -> Any:
        return _named(self._tree)[tensor_name]


class CerebrasStateDict(dict[str, Any]):
    """The tree of a checkpoint, whose tensors are read when they are used."""

    @classmethod
    def create(cls, spec: Any, filename: Path) -> "CerebrasStateDict":
        """Returns the tree of a file. Raises as `cstorch.load`.

        Args:
            spec: The structure of the tree; without effect, as the file has it too.
            filename: The file.
        """
        return cls(load(filename))

"""A dataset of an H5 checkpoint: the position of its bytes, and the read of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers the LZ4 filter with h5py
import numpy as np
import torch
import xxhash

from cstorch._internal.checkpoint_files import layout
from cstorch._internal.checkpoint_files.deferred import Unchanged, map_file
from cstorch.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The source of a tensor in an H5 file.

    stored: The shape and type of the numpy array in the file.
    offset: The position of the bytes in the file; None if they are compressed or in chunks.
    checksum: The checksum of the bytes; None in older files.
    """

    file: Unchanged
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[tuple[int, ...], np.dtype[Any]]
    offset: int | None
    checksum: str | None

    @staticmethod
    def of(dataset: h5py.Dataset, file: Unchanged, shape: tuple[int, ...], dtype: torch.dtype) -> "Dataset":
        """Returns the dataset of an open file as the source of a tensor of this shape and type."""
        return Dataset(
            file=file,
            name=dataset.name,
            shape=shape,
            dtype=dtype,
            stored=(dataset.shape, dataset.dtype),
            offset=dataset.id.get_offset(),
            checksum=dataset.attrs.get(layout.CHECKSUM),
        )

    def view(self) -> torch.Tensor:
        """Returns the value; see Source."""
        return layout.to_tensor(self._array(self.file.check()), self.dtype).reshape(self.shape)

    def _array(self, path: Path) -> np.ndarray[Any, Any]:
        shape, dtype = self.stored
        try:
            if self.offset is None:
                with h5py.File(path, "r") as file:
                    array = np.asarray(file[self.name][()])
            else:
                mapped = map_file(path, self.offset, int(np.prod(shape)) * dtype.itemsize)
                array = np.frombuffer(mapped, dtype).reshape(shape)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged: {self.name!r} cannot be read ({error})") from None
        _check(path, self.name, array, self.checksum)
        return array


def read_array(path: Path, dataset: h5py.Dataset) -> np.ndarray[Any, Any]:
    """Reads a dataset of an open file as a numpy array. Raises CheckpointError if its bytes are damaged."""
    array = np.asarray(dataset[()])
    _check(path, dataset.name, array, dataset.attrs.get(layout.CHECKSUM))
    return array


def _check(path: Path, name: str, array: np.ndarray[Any, Any], expected: str | None) -> None:
    """Raises CheckpointError if the array does not have the checksum of the file; older files have none."""
    if expected is None:
        return
    checksum = xxhash.xxh3_64()
    layout.add_to_checksum(checksum, array)
    if checksum.hexdigest() != expected:
        name = name.removeprefix("/")
        raise CheckpointError(f"{path} is damaged: the data of {name!r} do not have the checksum they were saved with")

"""The names, codes and byte forms of the checkpoint format, for the reader and the writer.

A checkpoint is one H5 file. Every leaf of the saved tree has a key, its path joined with dots. Tensors and numpy arrays
are datasets under their key. All other leaves are in attributes of the root: Python scalars, strings, None, tensors of
one value, and links to the same tensor. A key's description is in the attribute `<key>.__metadata__`. After the part
that HDF5 reads, a file of Waferbox has a checksum (structure.py).
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils import _pytree as pytree

from wsc.v1 import plan_pb2

FORMAT_VERSION: Final = 0.5

VERSION: Final = "__version__"
WRITER_VERSION: Final = "__cstorch_version__"
SPEC: Final = "__spec__"
SUCCESS: Final = "__SUCCESS__"
TYPE: Final = "__TYPE__"
METADATA: Final = ".__metadata__"
OBJECTS: Final = "__objects__"
LINKED: Final = "__LINKED__"
TORCH: Final = "__TORCH__"
NUMPY: Final = "__NUMPY__"
# Marks leaves without a dataset.
NO_DATA: Final = "__NONE__"
# An attribute of Waferbox, which the real client ignores.
CHECKSUM: Final = "__waferbox_xxh3__"

TENSOR: Final = "TorchTensorSerializer"
ARRAY: Final = "NumpyArraySerializer"
SCALAR: Final = "ScalarSerializer"
STRING: Final = "StringSerializer"
NONE: Final = "NoneSerializer"
FULL: Final = "DeferredFullTensor"
LINK: Final = "LinkedObject"

# The default factories of the defaultdicts that are saved and loaded as such.
FACTORIES: Final = (list, dict, set, tuple, int, float, str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """The stored form of a torch element type: the numpy type of its bytes, and the code of the real system."""

    numpy: np.dtype[Any]
    code: int


STORED_TYPES: Final = {
    torch.bool: StoredType(numpy=np.dtype(np.bool_), code=plan_pb2.ELEMENT_TYPE_BOOL),
    torch.int16: StoredType(numpy=np.dtype(np.int16), code=plan_pb2.ELEMENT_TYPE_INT16),
    torch.int32: StoredType(numpy=np.dtype(np.int32), code=plan_pb2.ELEMENT_TYPE_INT32),
    torch.int64: StoredType(numpy=np.dtype(np.int64), code=plan_pb2.ELEMENT_TYPE_INT64),
    torch.uint8: StoredType(numpy=np.dtype(np.uint8), code=plan_pb2.ELEMENT_TYPE_UINT8),
    torch.float16: StoredType(numpy=np.dtype(np.float16), code=plan_pb2.ELEMENT_TYPE_FLOAT16),
    torch.float32: StoredType(numpy=np.dtype(np.float32), code=plan_pb2.ELEMENT_TYPE_FLOAT32),
    torch.float64: StoredType(numpy=np.dtype(np.float64), code=plan_pb2.ELEMENT_TYPE_FLOAT64),
    # numpy has no bfloat16: its bit pattern is stored as int16.
    torch.bfloat16: StoredType(numpy=np.dtype(np.int16), code=plan_pb2.ELEMENT_TYPE_BFLOAT16),
}
TORCH_TYPES: Final = {str(dtype): dtype for dtype in STORED_TYPES}


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a CPU tensor as the numpy array that is stored."""
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def to_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor of a stored array, with the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def add_to_checksum(checksum: xxhash.xxh3_64, array: np.ndarray[Any, Any]) -> None:
    """Adds the bytes of the next rows to the checksum of a dataset."""
    checksum.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def key_of(path: pytree.KeyPath) -> str:
    """Returns the key of a leaf: `state["model"]["fc1.weight"]` has the key `model.fc1.weight`."""
    return ".".join(str(_part_of_key(part)) for part in path)


def _part_of_key(part: pytree.KeyEntry) -> object:
    match part:
        case pytree.MappingKey():
            return part.key
        case pytree.SequenceKey():
            return part.idx
        case pytree.GetAttrKey():
            return part.name
    raise TypeError(f"a checkpoint cannot hold a tree with a node of type {type(part).__name__}")

"""The digest of a batch, by which the first batch of a worker is compared with the one that the client has made."""

import hashlib
from collections.abc import Iterable
from typing import Any

LAYOUT_BYTES = 8  # of a digest: those of the element types and shapes, before those of the values
BATCH_DIGEST_BYTES = LAYOUT_BYTES + 16
_MOST_BYTES = 16 * 1024 * 1024  # of a tensor: of a larger one the first


def batch_digest(tensors: Iterable[Any]) -> bytes:
    """Returns the digest of the tensors of a batch, in the order of its leaves; empty if there is none with values."""
    layout, values = hashlib.blake2b(digest_size=LAYOUT_BYTES), hashlib.blake2b(digest_size=16)
    is_empty = True
    for tensor in tensors:
        if str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
            return b""
        is_empty = False
        layout.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        values.update(_bytes(tensor))
    return b"" if is_empty else layout.digest() + values.digest()


def is_other_batch(one: bytes, other: bytes) -> bool:
    """Whether two digests are those of batches that have the same element types and shapes, and other values."""
    known = len(one) == len(other) == BATCH_DIGEST_BYTES
    return known and one[:LAYOUT_BYTES] == other[:LAYOUT_BYTES] and one != other


def _bytes(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().reshape(-1)[: max(1, _MOST_BYTES // tensor.element_size())]
    # A copy has no gaps: a tensor with one element may have a stride that no view as bytes allows.
    return memoryview(flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy())

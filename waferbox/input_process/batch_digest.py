"""The digest of a batch, by which the first batch of a worker is compared with the one that the client has made."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

BATCH_DIGEST_BYTES = 16
_MOST_BYTES = 16 * 1024 * 1024  # of a tensor: of a larger one the first


class BatchDigest(NamedTuple):
    """Digests of all tensors of a batch: of their element types and shapes, and of their values. Empty: unknown."""

    layout: bytes
    values: bytes


UNKNOWN = BatchDigest(b"", b"")


def batch_digest(leaves: Iterable[Any]) -> BatchDigest:
    """Returns the digest of the tensors among the leaves of a batch; UNKNOWN if they have no values here."""
    import torch

    layout, values = hashlib.blake2b(digest_size=BATCH_DIGEST_BYTES), hashlib.blake2b(digest_size=BATCH_DIGEST_BYTES)
    is_empty = True
    for tensor in (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return UNKNOWN
        is_empty = False
        layout.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        values.update(_bytes(tensor))
    return UNKNOWN if is_empty else BatchDigest(layout.digest(), values.digest())


def _bytes(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().reshape(-1)[: max(1, _MOST_BYTES // tensor.element_size())]
    # A copy has no gaps: a tensor with one element may have a stride that no view as bytes allows.
    return memoryview(flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy())

"""autocast: mixed precision on the CPU backend."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cstorch.backend import use_cs
from cstorch.backends.mixed_precision import get_half_dtype


@contextmanager
def autocast(dtype: torch.dtype | None = None) -> Iterator[None]:
    """On the CPU backend torch.autocast, and on the cluster nothing: there the compiler inserts the casts, where
    `enable_mixed_precision` asks for them. A context, or a decorator of a function.

    Args:
        dtype: what to compute in; by default the half.
    """
    if use_cs():
        yield
        return
    with torch.autocast("cpu", dtype or get_half_dtype()):
        yield

"""autocast: mixed precision on the CPU backend."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cstorch.backend import use_cs
from cstorch.backends.mixed_precision import get_half_dtype


@contextmanager
def autocast(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Computes in half precision on the CPU backend; a context, or a decorator of a function.

    On the cluster it changes nothing: there the compiler inserts the casts, if `enable_mixed_precision` was called.

    Args:
        dtype: The type to compute in; None: the half type.

    Example:
        ::

            with cstorch.amp.autocast():
                loss = model(batch)

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    if use_cs():
        yield
        return
    with torch.autocast("cpu", dtype or get_half_dtype()):
        yield

"""Random tensors of the CPU in a step: drawn once, while it is recorded, they would be the same in every step."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch.tracing.operators import draws_numbers, operator
from cstorch.tracing.provenance import user_line
from cstorch.tracing.tensors.tensor import META


class HostRandom:
    """The CPU tensors of a step whose values were drawn in it, or were computed from such, and where they were drawn.

    It knows them by their storages, so that a view of one is one, and keeps them as long as the recording lasts.
    """

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def see(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """To be called after each operation that concerns no device tensor."""
        operands = list(_tensors((args, tuple(kwargs.values()))))
        line = user_line() if draws_numbers(func, args, kwargs) else self._first_line(operands)
        if line is None:
            return
        written = operator(func).written
        for tensor in (*_tensors(result), *_tensors([args[place] for place in written if place < len(args)])):
            storage = tensor.untyped_storage()
            self._drawn[storage._cdata] = storage, line

    def line_of(self, tensor: torch.Tensor) -> str | None:
        """The line that drew the values of a CPU tensor; None unless they were drawn in this step."""
        if not self._drawn or tensor.layout is not torch.strided:
            return None
        known = self._drawn.get(tensor.untyped_storage()._cdata)
        return known[1] if known is not None else None

    def _first_line(self, operands: list[torch.Tensor]) -> str | None:
        lines = (self.line_of(tensor) for tensor in operands) if self._drawn else ()
        return next((line for line in lines if line is not None), None)


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    """The strided CPU tensors in lists and tuples."""
    if isinstance(nest, torch.Tensor):
        if nest.layout is torch.strided and nest.device != META:
            yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from _tensors(item)

"""`torch.nn.init.trunc_normal_` on device tensors: one call that can be deferred.

torch draws a tensor of normal numbers, and draws another one as long as any number was out of bounds. So the state of
the generator afterwards depends on the numbers. They are drawn here a part at a time to find that state, and are not
kept; without a need for values they are not drawn at all.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import init

from cstorch._internal.tracing.context import context, purpose
from cstorch._internal.tracing.tensor import LazyTensor
from waferbox.cirh.execution.truncated_normal import TRUNCATED_NORMAL, draws_normal

_PART = 1 << 20  # a multiple of sixteen, which torch's kernel makes at once
_LEAST = 16  # torch makes fewer normal numbers by another algorithm


def replace_initialiser() -> None:
    """Makes `trunc_normal_` on device tensors one operation, in a step one without loops; called once per process."""
    original: Callable[..., torch.Tensor] = init._no_grad_trunc_normal_

    @functools.wraps(original)
    def initialise(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if isinstance(tensor, LazyTensor) and context.recorder is not None:
            return truncated_normal_(tensor, mean, std, a, b, generator)
        if not isinstance(tensor, LazyTensor) or not draws_normal(mean, std, a, b):
            return original(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            made: torch.Tensor = TRUNCATED_NORMAL(tensor, mean, std, a, b, generator=generator)
        return made

    init._no_grad_trunc_normal_ = initialise


@torch.no_grad()
def truncated_normal_(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """nn.init.trunc_normal_: the normal numbers of random probabilities between those of the bounds."""
    low, high = (a - mean) / std, (b - mean) / std
    sign = -1 if low > 0 else 1  # the lower tail has probabilities near 0, which float64 tells apart
    low, high = sorted((sign * low, sign * high))
    below_low, below_high = (math.erfc(-bound / math.sqrt(2)) / 2 for bound in (low, high))
    chances = torch.empty_like(tensor, dtype=torch.float64).uniform_(below_low, below_high, generator=generator)
    return tensor.copy_(mean + sign * std * torch.special.ndtri(chances).clamp(low, high))


def state_after(meta: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator) -> torch.Tensor:
    """Returns the state of a generator after the call; its present state if values are of no use.

    Args:
        meta: A contiguous meta tensor like the one that is initialised, with at least sixteen elements.
        args: The mean, the standard deviation, and the bounds.
        generator: The generator. It is not changed.
    """
    before = generator.get_state()
    if not purpose.runs_steps:
        return before
    mean, std, *bounds = args
    low, high = (torch.tensor(bound, dtype=meta.dtype, device="cpu").item() for bound in bounds)
    drawing = torch.Generator().set_state(before)
    buffer = torch.empty(min(meta.numel(), _PART + _LEAST), dtype=meta.dtype, device="cpu")
    waiting: list[torch.Tensor] = []  # by part: the indices of numbers out of bounds
    for size in _parts(meta.numel()):
        part = buffer[:size].normal_(mean, std, generator=drawing)
        waiting.append(((part < low) | (part > high)).nonzero().flatten())
    while any(len(indices) for indices in waiting):
        for number, size in enumerate(_parts(meta.numel())):
            part = buffer[:size].normal_(mean, std, generator=drawing)
            drawn = part[waiting[number]]
            waiting[number] = waiting[number][(drawn < low) | (drawn > high)]
    return drawing.get_state()


def _parts(count: int) -> Iterator[int]:
    """Yields the sizes of parts that give the numbers of the whole: of multiples of sixteen; the last has more."""
    for _ in range(math.ceil((count - _LEAST + 1) / _PART) - 1):
        yield _PART
        count -= _PART
    yield count

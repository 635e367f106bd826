"""Masks: the elements of a weight that are kept. All are tensor operations, so that a traced step can compute them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from waferbox.cirh.calls.highest_elements import mask_from_topk


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreShaper:
    """The division of a weight into groups that get equally many connections each.

    By default the whole weight is one group.

    Args:
        dim: 0 to divide the output channels, 1 for the input channels.
        groups: The number of groups, which are consecutive blocks of channels.
    """

    dim: int = 0
    groups: int = 1

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raises ValueError unless the weight can be divided."""
        if weight.dim() <= self.dim or weight.shape[self.dim] % self.groups:
            raise ValueError(f"{name} of shape {list(weight.shape)} cannot be divided in {self.groups} balanced groups")

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values as a matrix: a row for each group."""
        return values.transpose(0, self.dim).reshape(self.groups, -1)

    def shaped(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns a matrix of groups in the shape of a weight."""
        moved = like.transpose(0, self.dim).shape
        return rows.reshape(moved).transpose(0, self.dim)


WHOLE = ScoreShaper()


def _empty_mask(input: torch.Tensor, k: torch.Tensor, dimension: int) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=torch.bool)


# An operation of its own, so that a traced step has it whole: its cost is linear, and nothing where the count is 0.
# (torch.library.custom_op would import torch's compiler.)
_LIBRARY = torch.library.Library("cstorch", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("mask_from_topk(Tensor input, Tensor k, int dimension) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("mask_from_topk", mask_from_topk, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("mask_from_topk", _empty_mask, "Meta")  # type: ignore[no-untyped-call]


def highest(rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the `count` (int64, for all rows or each) highest of each row, the first of equal ones."""
    mask: torch.Tensor = torch.ops.cstorch.mask_from_topk(rows, count, 1)
    return mask


def num_kept(fraction: torch.Tensor, whole: int | torch.Tensor) -> torch.Tensor:
    """Returns a fraction of a number of elements, rounded to the nearest integer."""
    return torch.round(fraction * whole).to(torch.int64)


def keep_highest(scores: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper = WHOLE) -> torch.Tensor:
    """Returns the mask of the elements of highest score, as many as the sparsity leaves."""
    rows = shaper.grouped(scores)
    return shaper.shaped(highest(rows, num_kept(1 - sparsity, rows.shape[1])), scores)


def drop_and_grow(
    magnitudes: torch.Tensor,
    mask: torch.Tensor,
    scores: torch.Tensor,
    *,
    drop_fraction: torch.Tensor,
    sparsity: torch.Tensor,
    shaper: ScoreShaper = WHOLE,
) -> torch.Tensor:
    """Returns a mask without its smallest elements, and with those of highest score among the others.

    Dropped is the `drop_fraction` of its elements; they are among the others. It has as many elements as the sparsity
    leaves; nothing grows if that is fewer.
    """
    active = shaper.grouped(mask)
    target = num_kept(1 - sparsity, active.shape[1])
    count = torch.minimum(num_kept(1 - drop_fraction, active.sum(-1, keepdim=True)), target)
    kept = highest(torch.where(active, shaper.grouped(magnitudes), -1.0), count)
    grown = highest(torch.where(kept, torch.inf, shaper.grouped(scores)), target)
    return shaper.shaped(grown, mask)


def _random(weight: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper) -> torch.Tensor:
    return keep_highest(torch.rand_like(weight), sparsity, shaper)


def _topk(weight: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper) -> torch.Tensor:
    return keep_highest(weight.abs(), sparsity, shaper)


def _from_zeros(weight: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper) -> torch.Tensor:
    return weight != 0


def _checkerboard(weight: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper) -> torch.Tensor:
    """Evenly spaced along the diagonals: about as many as the sparsity leaves."""
    diagonal = torch.zeros_like(weight)
    for dim, size in enumerate(weight.shape):
        shape = [size if other == dim else 1 for other in range(weight.dim())]
        diagonal = diagonal + torch.arange(size).reshape(shape).to(weight.device)
    density = 1 - sparsity
    return torch.floor((diagonal + 1) * density) > torch.floor(diagonal * density)


_Init = Callable[[torch.Tensor, torch.Tensor, ScoreShaper], torch.Tensor]
_INIT_METHODS: dict[str, _Init] = {
    "random": _random,
    "topk": _topk,
    "from_zeros": _from_zeros,
    "checkerboard": _checkerboard,
}


def init_method(name: str) -> _Init:
    """Returns the function that makes the first mask. Raises ValueError for an unknown name."""
    if name not in _INIT_METHODS:
        raise ValueError(f"init_method is one of {', '.join(_INIT_METHODS)}, or a function, not {name!r}")
    return _INIT_METHODS[name]

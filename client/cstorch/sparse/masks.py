"""Masks: which elements of a weight are kept. All is tensor operations, so that a traced step can do it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from waferbox.cirh.calls.highest_elements import mask_from_topk


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreShaper:
    """How a weight is divided in groups that get equally many connections each: by output (dimension 0) or by input
    (dimension 1) channels, `groups` consecutive blocks of them. By default the whole weight is one group."""

    dim: int = 0
    groups: int = 1

    def check(self, name: str, weight: torch.Tensor) -> None:
        """ValueError unless the weight can be divided so."""
        if weight.dim() <= self.dim or weight.shape[self.dim] % self.groups:
            raise ValueError(f"{name} of shape {list(weight.shape)} cannot be divided in {self.groups} balanced groups")

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """As a matrix: a row for each group."""
        return values.transpose(0, self.dim).reshape(self.groups, -1)

    def shaped(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Back from a matrix of groups."""
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
    """The mask of the `count` highest of each row; of equal ones the first. count: int64, for all rows or for each."""
    mask: torch.Tensor = torch.ops.cstorch.mask_from_topk(rows, count, 1)
    return mask


def num_kept(fraction: torch.Tensor, whole: int | torch.Tensor) -> torch.Tensor:
    """A fraction of a number of elements, rounded to the nearest integer."""
    return torch.round(fraction * whole).to(torch.int64)


def keep_highest(scores: torch.Tensor, sparsity: torch.Tensor, shaper: ScoreShaper = WHOLE) -> torch.Tensor:
    """The mask of the elements of highest score, as many as the sparsity leaves."""
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
    """A mask without the `drop_fraction` of its elements that are smallest, and with those of highest score among all
    others (those just dropped too), as many as the sparsity leaves. Nothing grows where it leaves fewer."""
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
    """How the first mask is made; ValueError for a name that is not known."""
    if name not in _INIT_METHODS:
        raise ValueError(f"init_method is one of {', '.join(_INIT_METHODS)}, or a function, not {name!r}")
    return _INIT_METHODS[name]

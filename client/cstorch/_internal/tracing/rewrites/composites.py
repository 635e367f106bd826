"""Functions of torch that are recorded as simpler operations, with the same values and gradients.

Their own operations take the batch in a form that cannot be split, or depend on values where others depend on shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.rewrites import distributions, foreach, halves, losses, masked_writes, quantization
from cstorch._internal.tracing.tensor import LazyTensor
from cstorch.errors import TraceError


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """functional.embedding with a dense gradient, which has the same numbers as a sparse one."""
    if max_norm is not None:
        with torch.no_grad():
            _limit_rows(weight, input, max_norm, norm_type)
    return functional.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def _limit_rows(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """torch.embedding_renorm_: limits the norm of the used rows to max_norm, in place."""
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    shortened = torch.where(norms > max_norm, weight * (max_norm / (norms + 1e-7)), weight)
    ones = torch.ones(indices.shape, dtype=weight.dtype, device=weight.device).flatten()
    counts = weight.new_zeros(weight.shape[0]).index_add(0, indices.flatten(), ones)
    weight.copy_(torch.where(counts.unsqueeze(1) > 0, shortened, weight))


def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """functional.embedding_bag for bags of one size: the rows of a matrix of indices."""
    if offsets is not None or input.dim() != 2:
        raise TraceError(
            f"at {user_line()} embedding_bag is given bags of different sizes. The Cerebras backend needs a tensor "
            f"that begins with the batch size: give the indices as a matrix, one row for each bag, filled up with "
            f"padding_idx."
        )
    if scale_grad_by_freq:
        raise TraceError(f"at {user_line()} embedding_bag with scale_grad_by_freq is not supported; leave it out")
    if per_sample_weights is not None and mode != "sum":
        raise NotImplementedError(f"embedding_bag takes per_sample_weights only with mode='sum', not {mode!r}")
    if mode == "max" and sparse:
        raise ValueError("embedding_bag with mode='max' does not support sparse gradients")
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
    rows = _embedding(input, weight, padding_idx, max_norm, norm_type)
    kept = None if padding_idx is None else (input != padding_idx).unsqueeze(-1)
    if mode == "max":
        return _largest(rows, kept)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if kept is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    total = (rows * kept).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _largest(rows: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Returns the maxima of the bags; zeros for a bag of padding only."""
    if kept is None:
        return rows.max(1).values
    largest = rows.masked_fill(~kept, -torch.inf).max(1).values
    return torch.where(kept.any(1), largest, torch.zeros_like(largest))


def _multinomial(
    input: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """torch.multinomial: the largest of weights over exponential numbers, as torch draws. Weights are not checked."""
    rows = input.unsqueeze(-2).expand(*input.shape[:-1], num_samples, input.shape[-1]) if replacement else input
    chances = rows / torch.empty_like(rows).exponential_(generator=generator)
    return chances.argmax(-1) if replacement else chances.topk(num_samples, -1).indices


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """functional.one_hot as a scatter, which fails for a class that there is not, as torch does for values at hand."""
    if num_classes < 0:
        return functional.one_hot(tensor)
    nothing = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return nothing.scatter(-1, tensor.unsqueeze(-1), 1)


_COMPOSITES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    functional.ctc_loss: losses.ctc_loss,
    functional.gaussian_nll_loss: losses.gaussian_nll_loss,
    functional.multi_margin_loss: losses.multi_margin_loss,
    functional.one_hot: _one_hot,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    **distributions.FORMS,
    **quantization.FORMS,
    **masked_writes.FORMS,
    **halves.FORMS,
    **foreach.FORMS,
}


def recorded_function(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Returns the function to call instead of a torch function: another form for the device, or the function itself."""
    composite = _COMPOSITES.get(function)
    if composite is None or not any(isinstance(argument, LazyTensor) for argument in arguments):
        return function
    return composite

"""Attention by batched matrix products, some heads at a time, so that most of the scores never exist together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

aten = torch.ops.aten

# The most bytes of scores at once, if one head has no more: with more, the cache does not hold them.
BLOCK_BYTES: Final = 24 << 20

Block = tuple[slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What attention does beside its products.

    Attributes:
        is_causal: whether later keys are hidden from earlier queries.
        scale: factor of the scores, before masks are added.
        has_dropout: whether there is dropout: the last operand says which weights are kept.
        dropout: factor of the weights that dropout keeps.
        mask_grad: number of the mask whose gradient is made; None: none.
        first_query: the key at which the first query stands, for a causal mask.
    """

    is_causal: bool
    scale: float
    has_dropout: bool = False
    dropout: float = 1.0
    mask_grad: int | None = None
    first_query: int = 0


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[Block]:
    """Yields slices of samples and heads whose scores are computed together."""
    samples, heads = query.shape[:2]
    at_once = max(1, BLOCK_BYTES // (query.shape[2] * key.shape[2] * query.element_size()))
    if at_once >= heads:
        at_once //= heads
        for sample in range(0, samples, at_once):
            yield slice(sample, sample + at_once), slice(None)
    else:
        for sample in range(samples):
            for head in range(0, heads, at_once):
                yield slice(sample, sample + 1), slice(head, head + at_once)


def _part(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """The part of a mask, or of its gradient, that belongs to a block."""
    if tensor.dim() < 4:
        return tensor
    samples, heads = (part if size > 1 else slice(None) for part, size in zip(block, tensor.shape, strict=False))
    return tensor[samples, heads]


def _weights(
    query: torch.Tensor, key: torch.Tensor, masks: Sequence[torch.Tensor], terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a block, of four dimensions, and the largest score of each query."""
    samples, heads, queries, features = query.shape
    shape = (samples * heads, queries, key.shape[2])
    hidden = query.new_full(shape[1:], -math.inf).triu_(1) if terms.is_causal else query.new_zeros(())
    matrices = query.reshape(-1, queries, features), key.reshape(-1, key.shape[2], features).mT
    scores = torch.baddbmm(hidden.expand(shape), *matrices, beta=1 if terms.is_causal else 0, alpha=terms.scale)
    scores = scores.view(samples, heads, *shape[1:])
    for mask in masks:
        scores += mask
    weights, largest = torch.softmax(scores, -1), scores.amax(-1)
    if masks:
        # A query from which all keys are hidden gives zeros, as in torch's fused attention.
        weights.masked_fill_((largest == -math.inf).unsqueeze(-1), 0)
    return weights, largest


def _split(others: Sequence[torch.Tensor], terms: Terms) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """The masks, and the truth values of dropout."""
    return (others[:-1], others[-1]) if terms.has_dropout else (others, None)


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes the products of a block to the part of a result, which lies in one piece."""
    return torch.bmm(left.flatten(0, 1), right.reshape(-1, *right.shape[2:]), out=out.flatten(0, 1))


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: Sequence[torch.Tensor], terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logsumexp of each query's scores."""
    masks, kept = _split(others, terms)
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(query.shape)
    logsumexp = query.new_empty(query.shape[:3], dtype=wide)
    for block in _blocks(query, key):
        weights, largest = _weights(query[block], key[block], [_part(mask, block) for mask in masks], terms)
        # The largest weight is exp(largest score - logsumexp): two maxima cost less than all exponentials again.
        logsumexp[block] = largest.to(wide) - weights.amax(-1).to(wide).log()
        if kept is not None:
            weights.mul_(kept[block]).mul_(terms.dropout)
        _multiply(weights, value[block], output[block])
    return output, logsumexp


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    terms: Terms,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value, and of a mask if it is asked for."""
    masks, kept = _split(others, terms)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    grad_mask = None
    if terms.mask_grad is not None:
        mask = masks[terms.mask_grad]
        grad_mask = mask.new_zeros(mask.shape, dtype=torch.promote_types(mask.dtype, torch.float32))
    for block in _blocks(query, key):
        grad, q, k, v = (tensor[block] for tensor in (gradient, query, key, value))
        weights, _ = _weights(q, k, [_part(mask, block) for mask in masks], terms)
        used = weights if kept is None else (weights * kept[block]).mul_(terms.dropout)
        _multiply(used.mT, grad, grad_value[block])
        del used
        grad_weights = torch.matmul(grad, v.mT)
        if kept is not None:
            grad_weights.mul_(kept[block]).mul_(terms.dropout)
        grad_scores = aten._softmax_backward_data.default(grad_weights, weights, -1, weights.dtype)
        del weights, grad_weights
        if grad_mask is not None:
            part = _part(grad_mask, block)
            part += grad_scores.sum_to_size(part.shape)
        _multiply(grad_scores, k, grad_query[block])
        _multiply(grad_scores.mT, q, grad_key[block])
    gradients = grad_query.mul_(terms.scale), grad_key.mul_(terms.scale), grad_value
    return gradients if grad_mask is None else (*gradients, grad_mask.to(masks[0].dtype))

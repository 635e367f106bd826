"""Attention by torch's fused kernel, called several times: where heads share keys, or queries begin behind keys.

The kernel takes a key for each head, and hides keys as if the first query stood at the first key. Here one call does
each head of those that share keys, so that no key is repeated. Keys before the first query are another call, since no
query hides one of them. The logsumexp of all keys joins the outputs of both calls; with it, each call makes its part of
the gradients.
"""

from collections.abc import Iterator

import torch

from waferbox.cirh.calls.attention_products import Terms

aten = torch.ops.aten
_attend = aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(
    terms: Terms, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logsumexp of each query's scores."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    logsumexp = output.new_empty(query.shape[:3], dtype=_wide(query))
    for heads in _heads(query, key):
        made = [
            _attend(query[heads], key[:, :, keys], value[:, :, keys], 0.0, is_causal, scale=terms.scale)
            for keys, is_causal in _seen(query, key, terms)
        ]
        first, *more = made
        if more:
            total = torch.logaddexp(first[1], more[0][1])
            shares = [part * (each - total).exp().unsqueeze(-1) for part, each in made]
            first = shares[0] + shares[1], total
        output[heads], logsumexp[heads] = first
    return output, logsumexp


def backward(
    terms: Terms,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value."""
    # Halves are added in float32.
    sums = [torch.zeros(tensor.shape, dtype=_wide(query)) for tensor in (query, key, value)]
    for heads in _heads(query, key):
        for keys, is_causal in _seen(query, key, terms):
            parts = _attend_backward(
                *(gradient[heads], query[heads], key[:, :, keys], value[:, :, keys], output[heads]),
                logsumexp[heads].contiguous(),
                0.0,
                is_causal,
                scale=terms.scale,
            )
            grad_query, grad_key, grad_value = sums
            for place, part in zip(
                (grad_query[heads], grad_key[:, :, keys], grad_value[:, :, keys]), parts, strict=True
            ):
                place += part
    return tuple(total.to(query.dtype) for total in sums)


def _wide(query: torch.Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _heads(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields the heads that have different keys, as often as heads share one."""
    shared = query.shape[1] // key.shape[1]
    for number in range(shared):
        yield slice(None), slice(number, None, shared)


def _seen(query: torch.Tensor, key: torch.Tensor, terms: Terms) -> Iterator[tuple[slice, bool]]:
    """Yields parts of the keys, and whether later ones of the part are hidden from earlier queries."""
    first = min(terms.first_query, key.shape[2]) if terms.is_causal else key.shape[2]
    if first:
        yield slice(first), False
    if first < key.shape[2]:
        yield slice(first, first + query.shape[2]), True

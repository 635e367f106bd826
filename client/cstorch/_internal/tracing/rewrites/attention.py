"""Scaled dot-product attention stays one operation in a traced step, forward and backward.

torch would decompose it for a device without an attention kernel. Here it becomes the operation that torch uses on a
CPU, which has a gradient. The cases that this operation lacks (dropout, a mask that needs a gradient) are decomposed.
"""

import torch

aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention for tensors on the device."""
    if enable_gqa:
        key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, query)
    query, key, value = _of_one_batch(query, key, value)
    if dropout_p > 0 or not _is_regular(query, key, value, attn_mask, is_causal):
        result: torch.Tensor = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return result
    output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output


def _is_regular(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> bool:
    """Whether the operation has the case: batches of heads, as many keys as values, a mask without a gradient."""
    if query.dim() != 4 or key.shape != value.shape or key.dim() != 4 or not query.dtype.is_floating_point:
        return False
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3] or 0 in (*query.shape, *key.shape):
        return False
    return mask is None or (not is_causal and not mask.requires_grad and mask.dim() in (2, 4))


def _of_one_batch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors with equal numbers of samples and heads; a single one is expanded."""
    if len({tensor.shape[:-2] for tensor in tensors}) == 1:
        return tensors
    shape = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))  # type: ignore[no-untyped-call]
    return tuple(tensor.expand(*shape, *tensor.shape[-2:]) for tensor in tensors)


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns a mask as numbers to add to the scores; True in a boolean mask means attention."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -torch.inf)
    return mask.to(query.dtype)


def _repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Returns key or value heads, each repeated for all query heads that share it."""
    batch, shared, *rest = heads.shape
    repeated = heads.unsqueeze(2).expand(batch, shared, count // shared, *rest)
    return repeated.reshape(batch, count, *rest)

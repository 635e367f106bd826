"""Scaled dot-product attention: one operation in each direction, and the choice of its kernel.

There are two kernels. "fused" is torch's CPU attention, which never holds all scores. "products" makes the scores with
batched matrix products. Neither is better everywhere (median ms of one thread, batch 4, 256 tokens, 12 heads of 64,
causal, on a CPU with AVX-512 and bfloat16 dot products, without AMX):

             forward: fused  products   backward: fused  products
    float32           11.3      19.9              29.7      54.2
    bfloat16          11.3       7.4              25.0      10.6
    float16           40.8     238.9             320.3     353.3
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo

aten = torch.ops.aten

# With more scores the cache does not hold them, and the backward pass is no longer faster with products.
LARGEST_SCORES_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one operation, and the reason for it."""

    kernel: str
    reason: str


def choose(site: Site) -> Choice:
    """The kernel for a site of cirh.Attention or cirh.AttentionGrad."""
    query, key, _ = _inputs(site)
    dtype = str(query.dtype).removeprefix("torch.")
    if query.dtype is not torch.bfloat16:
        return Choice("fused", f"in {dtype} the fused kernel is faster in both directions")
    if not _multiplies_bfloat16():
        return Choice("fused", "this CPU has no instructions for products of bfloat16")
    if _has_mask(site):
        return Choice("fused", "a mask may hide all keys from a query, which only the fused kernel provides for")
    if bool(site.get("is_causal")) and query.shape[2] > key.shape[2]:
        return Choice("fused", "there are more queries than keys, so that the causal mask is no square")
    nbytes = math.prod(query.shape[:3]) * key.shape[2] * query.dtype.itemsize
    if nbytes > LARGEST_SCORES_BYTES:
        return Choice("fused", f"{nbytes >> 20} MiB of scores are more than {LARGEST_SCORES_BYTES >> 20} MiB")
    return Choice("products", "in bfloat16 batched products are faster while the scores are few")


@cache
def _multiplies_bfloat16() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _is_gradient(site: Site) -> bool:
    return site.name == "cirh.AttentionGrad"


def _has_mask(site: Site) -> bool:
    return len(site.operands) == (7 if _is_gradient(site) else 4)


def _inputs(site: Site) -> tuple[TensorInfo, TensorInfo, TensorInfo]:
    query, key, value = site.operands[1:4] if _is_gradient(site) else site.operands[:3]
    return query, key, value


def attention_types(site: Site) -> tuple[TensorInfo, ...]:
    """Attention: output and logsumexp; AttentionGrad: gradients of query, key and value."""
    query, key, value = _inputs(site)
    if _is_gradient(site):
        return query, key, value
    return query, _logsumexp(query)


def _logsumexp(query: TensorInfo) -> TensorInfo:
    return TensorInfo(query.shape[:3], torch.promote_types(query.dtype, torch.float32))


def _check(site: Site) -> None:
    query, key, value = _inputs(site)
    shapes = [list(operand.shape) for operand in site.operands]
    if len(query.shape) != 4 or len(key.shape) != 4 or key != value or 0 in (*query.shape, *key.shape):
        raise CirhError(f"{site.name}: query, key and value of shapes {shapes} do not fit together")
    batch, heads, _, features = query.shape
    if (*key.shape[:2], key.shape[3], key.dtype) != (batch, heads, features, query.dtype):
        raise CirhError(f"{site.name}: query, key and value of shapes {shapes} do not fit together")
    if not query.dtype.is_floating_point:
        raise CirhError(f"{site.name}: works on floating point numbers, not {query.dtype}")
    if _is_gradient(site) and (site.operands[0], *site.operands[4:6]) != (query, query, _logsumexp(query)):
        raise CirhError(f"{site.name}: gradient, output and logsumexp of shapes {shapes} do not fit the query")
    if _has_mask(site):
        mask, whole = site.operands[-1], (batch, heads, query.shape[2], key.shape[2])
        fits = len(mask.shape) in (2, 4) and all(
            m in (1, w) for m, w in zip(mask.shape[::-1], whole[::-1], strict=False)
        )
        if not fits or mask.dtype is not query.dtype:
            raise CirhError(f"{site.name}: a mask {list(mask.shape)} of {mask.dtype} cannot be added to {list(whole)}")


def prepare_attention(site: Site) -> Call:
    """Operands: query, key, value of shape (batch, heads, tokens, features), and a mask that is added to the scores."""
    _check(site)
    causal, scale = bool(site.get("is_causal")), _scale(site)
    if choose(site).kernel == "products":
        return Call(partial(_forward, causal=causal, scale=scale))
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    return Call(lambda q, k, v, mask=None: fused(*_by_rows(q, k, v), 0.0, causal, attn_mask=mask, scale=scale))


def prepare_attention_grad(site: Site) -> Call:
    """Operands: the output's gradient, query, key, value, output and logsumexp of the forward pass, and the mask."""
    _check(site)
    causal, scale = bool(site.get("is_causal")), _scale(site)
    if choose(site).kernel == "products":
        return Call(partial(_backward, causal=causal, scale=scale))
    fused = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return Call(
        lambda grad, q, k, v, out, logsumexp, mask=None: fused(
            *_by_rows(grad, q, k, v, out), logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
    )


def _by_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with adjacent features of a token, which the fused kernel requires without a check."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _scale(site: Site) -> float:
    scale = site.get("scale")
    return 1 / math.sqrt(_inputs(site)[0].shape[-1]) if scale is None else float(scale)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """The scaled scores of matrices (n, tokens, features), -inf where the mask hides a key."""
    shape = (query.shape[0], query.shape[1], key.shape[1])
    hidden = query.new_full(shape[1:], -math.inf).triu_(1) if causal else query.new_zeros(())
    return torch.baddbmm(hidden.expand(shape), query, key.mT, beta=1 if causal else 0, alpha=scale)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query.flatten(0, 1), key.flatten(0, 1), causal, scale)
    weights = torch.softmax(scores, -1)
    output = torch.bmm(weights, value.flatten(0, 1)).view(query.shape)
    # The largest weight is exp(largest score - logsumexp): two maxima cost less than all exponentials a second time.
    wide = torch.promote_types(query.dtype, torch.float32)
    logsumexp = scores.amax(-1).to(wide) - weights.amax(-1).to(wide).log()
    return output, logsumexp.view(query.shape[:3])


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, q, k, v = (tensor.flatten(0, 1) for tensor in (gradient, query, key, value))
    weights = torch.softmax(_scores(q, k, causal, scale), -1)
    grad_value = torch.bmm(weights.mT, grad)
    grad_scores = aten._softmax_backward_data.default(torch.bmm(grad, v.mT), weights, -1, weights.dtype)
    grad_query = torch.bmm(grad_scores, k).mul_(scale)
    grad_key = torch.bmm(grad_scores.mT, q).mul_(scale)
    return grad_query.view(query.shape), grad_key.view(key.shape), grad_value.view(value.shape)

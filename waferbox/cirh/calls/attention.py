"""Scaled dot-product attention: one operation in each direction, and the choice of its kernel.

There are two kernels. "fused" is torch's CPU attention, which never holds all scores. "products" makes the scores with
batched matrix products, some heads at a time (`attention_products.py`). Neither is better everywhere (median ms of one
thread, batch 4, 256 tokens, 12 heads of 64, causal, on a CPU with AVX-512 and bfloat16 dot products, without AMX):

             forward: fused  products   backward: fused  products
    float32           11.3      19.9              29.7      54.2
    bfloat16          11.3       7.4              25.0      10.6
    float16           40.8     238.9             320.3     353.3

The fused kernel has no dropout, adds one mask, and makes no gradient of it. In parts (`attention_parts.py`) it attends
where heads share keys, and where queries are a part of a row.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls import attention_parts
from waferbox.cirh.calls.attention_products import BLOCK_BYTES, Terms, backward, forward
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo

aten = torch.ops.aten

# The fused gradient computes weights as exp(score - logsumexp): float32 has no digits left for that far below zero.
_LEAST_LOGSUMEXP: Final = -1000.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one operation, and the reason for it."""

    kernel: str
    reason: str


def choose(site: Site) -> Choice:
    """The kernel for a site of cirh.Attention or cirh.AttentionGrad."""
    operands = _operands(site)
    query, key = operands.query, operands.key
    dtype = str(query.dtype).removeprefix("torch.")
    if is_in_parts(site):
        return Choice("fused", "the products have a key for each head, and all queries of a row")
    if operands.kept is not None:
        return Choice("products", "the fused kernel has no dropout")
    if len(operands.masks) > 1:
        return Choice("products", "the fused kernel adds one mask alone")
    if site.get("mask_grad") is not None:
        return Choice("products", "the fused kernel makes no gradient of a mask")
    if query.dtype is not torch.bfloat16:
        return Choice("fused", f"in {dtype} the fused kernel is faster in both directions")
    if not _multiplies_bfloat16():
        return Choice("fused", "this CPU has no instructions for products of bfloat16")
    if operands.masks:
        return Choice("fused", "a mask costs the products one more pass over all scores")
    if bool(site.get("is_causal")) and query.shape[2] > key.shape[2]:
        return Choice("fused", "there are more queries than keys, so that the causal mask is no square")
    nbytes = scores_bytes(query, key)
    if nbytes > BLOCK_BYTES:
        return Choice("fused", f"{nbytes >> 20} MiB of scores are more than {BLOCK_BYTES >> 20} MiB")
    return Choice("products", "in bfloat16 batched products are faster while the scores are few")


def is_in_parts(site: Site) -> bool:
    """Whether heads share keys, or the queries are a part of a row."""
    operands = _operands(site)
    return operands.query.shape[1] != operands.key.shape[1] or bool(site.get("first_query"))


@cache
def _multiplies_bfloat16() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def scores_bytes(query: TensorInfo, key: TensorInfo) -> int:
    """The bytes of all scores: one for each query and key."""
    return math.prod(query.shape[:3]) * key.shape[2] * query.dtype.itemsize


def block_bytes(site: Site) -> int:
    """The bytes of the scores that "products" holds at once."""
    operands = _operands(site)
    query, key = operands.query, operands.key
    whole = scores_bytes(query, key)
    return min(whole, max(BLOCK_BYTES, whole // math.prod(query.shape[:2])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """The types of the operands by their meaning. Those of the gradient alone are in `saved`."""

    query: TensorInfo
    key: TensorInfo
    value: TensorInfo
    saved: tuple[TensorInfo, ...]
    masks: tuple[TensorInfo, ...]
    kept: TensorInfo | None


def _is_gradient(site: Site) -> bool:
    return site.name == "cirh.AttentionGrad"


def _operands(site: Site) -> _Operands:
    *_, num_masks, num_kept = site.segments
    tensors = len(site.operands) - num_masks - num_kept
    first = 1 if _is_gradient(site) else 0
    query, key, value = site.operands[first : first + 3]
    return _Operands(
        query=query,
        key=key,
        value=value,
        saved=(*site.operands[:first], *site.operands[first + 3 : tensors]),
        masks=site.operands[tensors : tensors + num_masks],
        kept=site.operands[-1] if num_kept else None,
    )


def attention_types(site: Site) -> tuple[TensorInfo, ...]:
    """Attention: output and logsumexp; AttentionGrad: gradients of query, key and value, and of a mask if asked for."""
    operands = _operands(site)
    if not _is_gradient(site):
        return operands.query, _logsumexp(operands.query)
    number = site.get("mask_grad")
    return operands.query, operands.key, operands.value, *(() if number is None else (operands.masks[number],))


def _logsumexp(query: TensorInfo) -> TensorInfo:
    return TensorInfo(query.shape[:3], torch.promote_types(query.dtype, torch.float32))


def _check(site: Site) -> None:
    operands = _operands(site)
    query, key = operands.query, operands.key
    shapes = [list(operand.shape) for operand in site.operands]
    if len(query.shape) != 4 or len(key.shape) != 4 or key != operands.value or 0 in (*query.shape, *key.shape):
        raise CirhError(f"{site.name}: query, key and value of shapes {shapes} do not fit together")
    batch, heads, _, features = query.shape
    if (key.shape[0], key.shape[3], key.dtype) != (batch, features, query.dtype) or heads % key.shape[1]:
        raise CirhError(f"{site.name}: query, key and value of shapes {shapes} do not fit together")
    if not query.dtype.is_floating_point:
        raise CirhError(f"{site.name}: works on floating point numbers, not {query.dtype}")
    if is_in_parts(site) and (operands.masks or operands.kept is not None):
        raise CirhError(
            f"{site.name}: with a mask or dropout, each head has keys, and the first query is the first key"
        )
    if site.get("first_query", 0) < 0:
        raise CirhError(f"{site.name}: the first query is at key {site.get('first_query')}")
    if operands.saved not in ((), (query, query, _logsumexp(query))):
        raise CirhError(f"{site.name}: gradient, output and logsumexp of shapes {shapes} do not fit the query")
    whole = (batch, heads, query.shape[2], key.shape[2])
    for mask in operands.masks:
        fits = len(mask.shape) in (2, 4) and all(
            m in (1, w) for m, w in zip(mask.shape[::-1], whole[::-1], strict=False)
        )
        if not fits or mask.dtype is not query.dtype:
            raise CirhError(f"{site.name}: a mask {list(mask.shape)} of {mask.dtype} cannot be added to {list(whole)}")
    if operands.kept not in (None, (whole, torch.bool)):
        raise CirhError(f"{site.name}: dropout takes a truth value for each of the scores {list(whole)}")
    if (operands.kept is None) is not (site.get("dropout") is None):
        raise CirhError(f"{site.name}: dropout takes a factor and the weights that are kept")
    if not 0 <= site.get("mask_grad", 0) < max(len(operands.masks), 1):
        raise CirhError(f"{site.name}: there is no mask {site.get('mask_grad')}")


def prepare_attention(site: Site) -> Call:
    """Operands: query, key, value of shape (batch, heads, tokens, features), masks that are added to the scores, and
    which weights dropout keeps. Heads in a row may share a key and a value. `first_query`: the key at which the first
    query stands, if the mask is causal.
    """
    _check(site)
    terms = _terms(site)
    if is_in_parts(site):
        return Call(lambda *tensors: attention_parts.forward(terms, *_by_rows(*tensors)))
    if choose(site).kernel == "products":
        return Call(lambda q, k, v, *others: forward(q, k, v, others, terms))
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    causal, scale = terms.is_causal, terms.scale
    return Call(lambda q, k, v, mask=None: fused(*_by_rows(q, k, v), 0.0, causal, attn_mask=mask, scale=scale))


def prepare_attention_grad(site: Site) -> Call:
    """Operands: the output's gradient, query, key, value, output and logsumexp of the forward pass, then as there.

    `hides_rows`: whether a mask may hide all keys of a query by finite numbers, which have the gradient of softmax.
    """
    _check(site)
    terms = _terms(site)
    if is_in_parts(site):
        return Call(lambda *tensors: attention_parts.backward(terms, *_by_rows(*tensors)))
    if choose(site).kernel == "products":
        return Call(lambda grad, q, k, v, _output, _logsumexp, *others: backward(grad, q, k, v, others, terms))
    fused = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    causal, scale, may_hide_rows = terms.is_causal, terms.scale, bool(site.get("hides_rows"))

    def call(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        *masks: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        if may_hide_rows and bool((logsumexp < _LEAST_LOGSUMEXP).any()):
            return backward(grad, query, key, value, masks, terms)
        tensors = _by_rows(grad, query, key, value, output)
        made: tuple[torch.Tensor, ...] = fused(
            *tensors, logsumexp, 0.0, causal, attn_mask=masks[0] if masks else None, scale=scale
        )
        return made

    return Call(call)


def _by_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with adjacent features of a token, which the fused kernel requires without a check."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _terms(site: Site) -> Terms:
    scale = site.get("scale")
    return Terms(
        is_causal=bool(site.get("is_causal")),
        scale=1 / math.sqrt(_operands(site).query.shape[-1]) if scale is None else float(scale),
        has_dropout=_operands(site).kept is not None,
        dropout=site.get("dropout", 1.0),
        mask_grad=site.get("mask_grad"),
        first_query=site.get("first_query", 0),
    )

"""Attention: both kernels give what torch's attention and its gradient give, and the choice between them."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from waferbox.cirh import CirhError
from waferbox.cirh.calls import attention
from waferbox.cirh.calls.attention import choose
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def heads(dtype: torch.dtype, queries: int = 6, keys: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, 8, generator=generator, dtype=F64).to(dtype) for n in (queries, keys, keys)]


def site(
    name: str, operands: list[torch.Tensor], causal: bool = False, scale: float | None = None, first: int = 0
) -> Site:
    scales: tuple[tuple[str, AttrValue], ...] = () if scale is None else (("scale", scale),)
    scales += (("first_query", first),) if first else ()
    infos = tuple(TensorInfo(tuple(t.shape), t.dtype) for t in operands)
    tensors = 6 if name == "cirh.AttentionGrad" else 3
    segments = (*[1] * tensors, len(operands) - tensors, 0)
    return Site(name, infos, (("is_causal", causal), *scales), segments=segments)


def forward(operands: list[torch.Tensor], causal: bool = False, scale: float | None = None, first: int = 0) -> Call:
    return attention.prepare_attention(site("cirh.Attention", operands, causal, scale, first))


def backward(operands: list[torch.Tensor], causal: bool = False, scale: float | None = None, first: int = 0) -> Call:
    return attention.prepare_attention_grad(site("cirh.AttentionGrad", operands, causal, scale, first))


@pytest.mark.parametrize("kernel", ["fused", "products"])
@pytest.mark.parametrize(("causal", "queries", "keys"), [(False, 6, 6), (True, 6, 6), (False, 4, 7), (True, 4, 7)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (F32, 1e-5), (BF16, 2e-2)])
def test_both_kernels_equal_torch(
    kernel: str, causal: bool, queries: int, keys: int, scale: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    operands = heads(dtype, queries, keys)
    exact = [t.double().clone().requires_grad_() for t in operands]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        query, key, value = exact
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    gradient = torch.ones_like(expected).cos().cumsum(-1) * 0.1
    expected.backward(gradient)
    with mock.patch.object(attention, "choose", return_value=attention.Choice(kernel, "")):
        output, logsumexp = forward(operands, causal=causal, scale=scale).function(*operands)
        saved = [gradient.to(dtype), *operands, output, logsumexp]
        gradients = backward(saved, causal=causal, scale=scale).function(*saved)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for actual, leaf in zip(gradients, exact, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(actual.double(), leaf.grad, rtol=tolerance, atol=tolerance * 4)
    scores = (exact[0] @ exact[1].mT).detach() * (8**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).tril().logical_not(), -torch.inf)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    ("causal", "first", "queries"),
    [(True, 0, 6), (True, 2, 3), (True, 4, 2), (True, 5, 4), (True, 6, 3), (True, 0, 8), (False, 2, 3)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (F32, 1e-5), (BF16, 3e-2)])
def test_heads_share_keys_and_queries_begin_behind_keys(
    shared: int, causal: bool, first: int, queries: int, dtype: torch.dtype, tolerance: float
) -> None:
    query, *_ = heads(dtype, queries)
    key, value = (each[:, : 3 // shared] for each in heads(dtype)[1:])
    operands = [query, key, value]
    exact = [t.double().clone().requires_grad_() for t in operands]
    seen = torch.arange(6) <= torch.arange(queries)[:, None] + first if causal else torch.ones(queries, 6).bool()
    keys, values = (each.repeat_interleave(shared, 1) for each in exact[1:])
    expected = F.scaled_dot_product_attention(exact[0], keys, values, attn_mask=seen)
    gradient = torch.ones_like(expected).cos().cumsum(-1) * 0.1
    expected.backward(gradient)
    output, logsumexp = forward(operands, causal=causal, first=first).function(*operands)
    saved = [gradient.to(dtype), *operands, output, logsumexp]
    gradients = backward(saved, causal=causal, first=first).function(*saved)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for actual, leaf in zip(gradients, exact, strict=True):
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.double(), leaf.grad, rtol=tolerance, atol=tolerance * 4)


def test_a_query_without_keys_gives_zeros() -> None:
    operands = heads(F64)
    mask = torch.zeros(6, 6, dtype=F64)
    mask[2] = -torch.inf
    output, logsumexp = forward([*operands, mask]).function(*operands, mask)
    assert output[:, :, 2].eq(0).all()
    saved = [torch.ones_like(output), *operands, output, logsumexp, mask]
    gradients = backward(saved).function(*saved)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, :, 2].eq(0).all()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_operands_may_lie_in_memory_as_they_like(which: int, causal: bool) -> None:
    """torch's kernel reads wrong memory where the features of a token do not lie side by side."""
    operands = heads(F64)
    strided = list(operands)
    strided[which] = operands[which].mT.contiguous().mT
    call = forward(operands, causal=causal)
    output, logsumexp = call.function(*operands)
    torch.testing.assert_close(call.function(*strided), (output, logsumexp), rtol=0, atol=0)
    gradient = output.cos()
    call = backward([gradient, *operands, output, logsumexp], causal=causal)
    expected = call.function(gradient, *operands, output, logsumexp)
    torch.testing.assert_close(
        call.function(gradient.mT.contiguous().mT, *strided, output, logsumexp), expected, rtol=0, atol=0
    )


def kernel_of(dtype: torch.dtype, tokens: int = 256, mask: bool = False, products: bool = True) -> attention.Choice:
    shape = (4, 12, tokens, 64)
    operands = [torch.empty(shape, dtype=dtype, device="meta")] * 3
    operands += [torch.empty(tokens, tokens, dtype=dtype, device="meta")] if mask else []
    with mock.patch.object(attention, "_multiplies_bfloat16", return_value=products):
        return choose(site("cirh.Attention", operands, causal=not mask))


def test_the_choice_goes_by_type_and_shape() -> None:
    assert kernel_of(BF16).kernel == "products"
    assert {kernel_of(dtype).kernel for dtype in (F32, F64, torch.float16)} == {"fused"}
    reasons = {
        "few": kernel_of(BF16).reason,
        "float32": kernel_of(F32).reason,
        "MiB of scores": kernel_of(BF16, tokens=2048).reason,
        "mask": kernel_of(BF16, mask=True).reason,
        "instructions": kernel_of(BF16, products=False).reason,
    }
    for word, reason in reasons.items():
        assert word in reason
    assert len(set(reasons.values())) == len(reasons)


@pytest.mark.parametrize(
    "operands",
    [
        [torch.zeros(2, 3, 4)] * 3,
        [torch.zeros(2, 3, 4, 8), torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)],
        [torch.zeros(2, 3, 4, 8), torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), torch.zeros(4, 4)],
        [torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)],
        [torch.zeros(2, 3, 4, 8), *[torch.zeros(2, 3, 4, 8, dtype=F64)] * 2],
        [torch.zeros(2, 3, 4, 8, dtype=torch.int64)] * 3,
        [*[torch.zeros(2, 3, 4, 8)] * 3, torch.zeros(4, 4, dtype=torch.bool)],
        [*[torch.zeros(2, 3, 4, 8)] * 3, torch.zeros(3, 4)],
        [*[torch.zeros(2, 3, 0, 8)] * 3],
    ],
)
def test_operands_that_do_not_fit_are_refused(operands: list[torch.Tensor]) -> None:
    with pytest.raises(CirhError, match=r"cirh\.Attention"):
        forward(operands)


def test_a_first_query_before_all_keys_is_refused() -> None:
    with pytest.raises(CirhError, match="at key -1"):
        forward(heads(F32), causal=True, first=-1)


def test_saved_values_that_do_not_fit_are_refused() -> None:
    operands = heads(F32)
    with pytest.raises(CirhError, match=r"cirh\.AttentionGrad"):
        backward([*operands, *operands])

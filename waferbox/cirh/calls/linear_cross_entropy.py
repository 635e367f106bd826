"""Cross entropy of logits that a product makes, some rows at a time, so that most logits never exist together.

The backward pass makes the logits again. Statistics and losses are float32 at least; products have the type of their
operands.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo

# The most bytes of logits at once, if one row has no more.
BLOCK_BYTES: Final = 32 << 20


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics and losses."""
    return torch.promote_types(dtype, torch.float32)


def block_rows(rows: int, classes: int, dtype: torch.dtype) -> int:
    """The number of rows whose logits exist at once."""
    return max(1, min(rows, BLOCK_BYTES // (classes * wide(dtype).itemsize)))


def linear_cross_entropy_types(site: Site) -> tuple[TensorInfo, ...]:
    """LinearCrossEntropy: loss, spread and logsumexp of each row; LinearCrossEntropyGrad: the gradients asked for."""
    x, weight, labels = _inputs(site)
    if site.name == "cirh.LinearCrossEntropy":
        return (TensorInfo(labels.shape, wide(x.dtype)),) * 3
    trained = (weight, *site.operands[-site.segments[-1] or len(site.operands) :]) if site.get("is_trained") else ()
    return x, *trained


def _inputs(site: Site) -> tuple[TensorInfo, TensorInfo, TensorInfo]:
    first = 0 if site.name == "cirh.LinearCrossEntropy" else 4
    x, weight, labels = site.operands[first : first + 3]
    return x, weight, labels


def _check(site: Site) -> None:
    x, weight, labels = _inputs(site)
    bias = site.operands[-1] if site.segments[-1] else None
    rows = TensorInfo(labels.shape, wide(x.dtype))
    fits = len(x.shape) == len(weight.shape) == 2 and (x.shape[1], x.dtype) == (weight.shape[1], weight.dtype)
    fits = fits and labels == (x.shape[:1], torch.int64) and x.dtype.is_floating_point and 0 not in weight.shape
    fits = fits and bias in (None, (weight.shape[:1], x.dtype))
    fits = fits and all(operand == rows for operand in site.operands[:4] if site.name == "cirh.LinearCrossEntropyGrad")
    if not fits:
        given = ", ".join(f"{list(operand.shape)} {operand.dtype}" for operand in site.operands)
        raise CirhError(f"{site.name}: rows, classes and labels of {given} do not fit together")


def _blocks(x: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    step = block_rows(x.shape[0], weight.shape[0], x.dtype)
    return (slice(begin, begin + step) for begin in range(0, x.shape[0], step))


def _scaled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    product = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    logits = product.to(wide(x.dtype))
    return logits if scale == 1 else logits.mul_(scale)


def _factors(site: Site) -> tuple[float, float | None]:
    """The factor of the product, and the cap of the logits if there is one."""
    cap = site.get("cap")
    return float(site.get("scale", 1.0)), None if cap is None else float(cap)


def prepare_linear_cross_entropy(site: Site) -> Call:
    """Logits are `(input @ weight^T + bias) * scale`; with a cap, `cap * tanh` of that.

    Results, for each row: the loss; its spread, which is the sum of the losses that all classes would have as the label
    (label smoothing adds a part of it); and the logsumexp of the logits.
    """
    _check(site)
    scale, cap = _factors(site)

    def cross_entropy(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        loss, spread, logsumexp = (x.new_empty(labels.shape, dtype=wide(x.dtype)) for _ in range(3))
        for block in _blocks(x, weight):
            logits = _scaled(x[block], weight, bias, scale)
            if cap is not None:
                logits.tanh_().mul_(cap)
            largest = logits.amax(1)
            logits -= largest.unsqueeze(1)
            picked = logits.gather(1, labels[block].unsqueeze(1)).squeeze(1)
            total = logits.sum(1)
            logs = logits.exp_().sum(1).log_()
            loss[block] = logs - picked
            spread[block] = logs * weight.shape[0] - total
            logsumexp[block] = logs + largest
        return loss, spread, logsumexp

    return Call(cross_entropy)


def prepare_linear_cross_entropy_grad(site: Site) -> Call:
    """Operands: the gradients of loss, spread and logsumexp, the logsumexp, then those of the forward pass.

    Results: the gradient of the input, and with `is_trained` those of the weight and of the bias, if there is one.
    """
    _check(site)
    (scale, cap), is_trained = _factors(site), bool(site.get("is_trained"))

    def gradients(
        loss_grad: torch.Tensor,
        spread_grad: torch.Tensor,
        logsumexp_grad: torch.Tensor,
        logsumexp: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: Sequence[torch.Tensor | None] = (None, None, None),
    ) -> tuple[torch.Tensor, ...]:
        # The gradient of the input may be written over the input.
        input_grad = x.new_empty(x.shape) if out[0] is None else out[0]
        weight_grad = None
        if is_trained and out[1] is not None and out[1].dtype is wide(x.dtype):
            weight_grad = out[1].zero_()
        elif is_trained:
            weight_grad = weight.new_zeros(weight.shape, dtype=wide(x.dtype))
        bias_grad = weight.new_zeros(weight.shape[:1], dtype=wide(x.dtype)) if is_trained and bias is not None else None
        # d loss = p - label, d spread = classes * p - 1, d logsumexp = p
        of_probabilities = loss_grad + spread_grad * weight.shape[0] + logsumexp_grad
        for block in _blocks(x, weight):
            logits = _scaled(x[block], weight, bias, scale)
            tanh = None
            if cap is not None:
                tanh = logits.tanh_()
                logits = tanh * cap
            changed = logits.sub_(logsumexp[block].unsqueeze(1)).exp_().mul_(of_probabilities[block].unsqueeze(1))
            changed -= spread_grad[block].unsqueeze(1)
            changed.scatter_add_(1, labels[block].unsqueeze(1), loss_grad[block].neg().unsqueeze(1))
            if cap is not None and tanh is not None:
                changed.mul_(tanh.square_().neg_().add_(1)).mul_(cap)
            if scale != 1:
                changed.mul_(scale)
            if bias_grad is not None:
                bias_grad += changed.sum(0)
            changed = changed.to(x.dtype)
            if weight_grad is not None and weight_grad.dtype is x.dtype:
                weight_grad.addmm_(changed.t(), x[block])
            elif weight_grad is not None:
                weight_grad += torch.mm(changed.t(), x[block])
            torch.mm(changed, weight, out=input_grad[block])
        made = (input_grad, weight_grad, bias_grad)
        return tuple(
            gradient.to(x.dtype) if place is None else place if place is gradient else place.copy_(gradient)
            for gradient, place in zip(made, (*out, None), strict=False)
            if gradient is not None
        )

    return Call(gradients, gradients)


def temporary_bytes(site: Site) -> int:
    """The bytes that a call needs beside its operands and results."""
    x, weight, _ = _inputs(site)
    rows, classes = block_rows(x.shape[0], weight.shape[0], x.dtype), weight.shape[0]
    is_loss = site.name == "cirh.LinearCrossEntropy"
    copies = 1 if is_loss or site.get("cap") is None else 2  # the gradient keeps the tanh beside the logits
    block = (
        rows * classes * (copies * wide(x.dtype).itemsize + (x.dtype.itemsize if x.dtype is not wide(x.dtype) else 0))
    )
    if is_loss or not site.get("is_trained") or x.dtype is wide(x.dtype):
        return block
    # Gradients are summed in float32: the sum, and the part of a block.
    return block + math.prod(weight.shape) * (wide(x.dtype).itemsize + x.dtype.itemsize)

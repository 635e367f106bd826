"""Losses as simpler operations, in place of torch's own, which read values or have no decomposition."""

import math

import torch

from cstorch._internal.tracing.provenance import user_line
from cstorch.errors import TraceError

# Used for minus infinity, whose differences would have no gradient.
_NEVER = -1e30


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction != "none":
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """functional.gaussian_nll_loss, except that negative variances are no error: they count as eps."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1] != input.shape:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and var.shape != (*input.shape[:-1], 1):
        raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """functional.multi_margin_loss for a batch of samples."""
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    if input.dim() != 2 or size_average is not None or reduce is not None:
        raise TraceError(
            f"at {user_line()} multi_margin_loss takes a matrix, a row for each sample, and `reduction` instead of "
            "`size_average` and `reduce`"
        )
    labels = target.unsqueeze(1)
    hinge = torch.relu(margin - input.gather(1, labels) + input)
    if p == 2:
        hinge = hinge * hinge
    if weight is not None:
        hinge = hinge * weight[target].unsqueeze(1)
    is_own = labels == torch.arange(input.shape[1], device=input.device)
    return _reduced(hinge.masked_fill(is_own, 0).sum(1) / input.shape[1], reduction)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """functional.ctc_loss for a matrix of targets and tensors of lengths, with some operations for each time step.

    The gradient is that of the log probabilities themselves; torch adds their exponentials, which log_softmax removes.
    """
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(isinstance(given, torch.Tensor) for given in lengths):
        raise TraceError(
            f"at {user_line()} ctc_loss is given targets joined in one dimension, or lengths that are no tensors. The "
            "Cerebras backend needs tensors that begin with the batch size: give targets as a matrix, a row for each "
            "sample, and both lengths as tensors of the batch."
        )
    times, samples, _ = log_probs.shape
    # What stands behind the target is not read, and may be no class, such as -1.
    is_target = torch.arange(targets.shape[1], device=targets.device) < target_lengths.unsqueeze(1)
    targets = torch.where(is_target, targets, blank)
    # Blanks before, between and after the labels; a label may follow another one that differs without a blank.
    between = torch.full_like(targets, blank)
    path = torch.cat([torch.stack([between, targets], 2).reshape(samples, -1), between[:, :1]], 1)
    never = torch.full_like(path[:, :2], _NEVER, dtype=log_probs.dtype)
    may_skip = torch.cat([never < _NEVER, (path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2])], 1)
    emitted = log_probs[0].gather(1, path)
    alpha = torch.cat([emitted[:, :2], torch.full_like(emitted[:, 2:], _NEVER)], 1)
    for time in range(1, times):
        one = torch.cat([never[:, :1], alpha[:, :-1]], 1)
        two = torch.where(may_skip, torch.cat([never, alpha[:, :-2]], 1), _NEVER)
        following = torch.logsumexp(torch.stack([alpha, one, two]), 0) + log_probs[time].gather(1, path)
        alpha = torch.where((time < input_lengths).unsqueeze(1), following, alpha)
    last = 2 * target_lengths.unsqueeze(1)
    ends = [alpha.gather(1, last), torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), _NEVER)]
    loss = -torch.logsumexp(torch.stack(ends), 0).squeeze(1)
    loss = torch.where(loss > -_NEVER / 2, 0.0 if zero_infinity else torch.inf, loss)
    return _reduced(loss / target_lengths.clamp(min=1) if reduction == "mean" else loss, reduction)

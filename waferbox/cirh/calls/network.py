"""Preparing operations of networks that take more than one torch call."""

from collections.abc import Callable
from functools import partial

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.dialect.spec import Call, Site

aten = torch.ops.aten
DEFAULT_EPSILON = 1e-5


def prepare_softmax(site: Site) -> Call:
    rank = len(site.operands[0].shape)
    axis = site.get("axis", rank - 1)
    return Call(partial(torch.softmax, dim=axis_of(site, axis, rank)))


def prepare_cross_entropy(site: Site) -> Call:
    """Cross entropy. Results: the loss of each row, and its gradient (softmax minus one at the label)."""
    features, labels = site.operands
    axis = axis_of(site, site.get("axis"), len(features.shape))
    if labels.shape != (*features.shape[:axis], *features.shape[axis + 1 :]) or labels.dtype.is_floating_point:
        raise CirhError(f"{site.name}: labels {labels} do not fit features {list(features.shape)}")

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = targets.long().unsqueeze(axis)
        log_probabilities = torch.log_softmax(logits, axis)
        loss = log_probabilities.gather(axis, at).squeeze(axis).neg_()
        minus_one = torch.full((), -1.0, dtype=logits.dtype, device=logits.device).expand(at.shape)
        return loss, log_probabilities.exp_().scatter_add_(axis, at, minus_one)

    return Call(cross_entropy)


def _normalized(site: Site, operand: int, beta: int, gamma: int) -> list[int]:
    shape = site.operands[gamma].shape
    if site.operands[beta].shape != shape or not shape or site.operands[operand].shape[-len(shape) :] != shape:
        raise CirhError(f"{site.name}: shapes {[list(o.shape) for o in site.operands]} do not fit together")
    return list(shape)


def prepare_layer_norm(site: Site) -> Call:
    shape = _normalized(site, 0, 1, 2)
    epsilon = site.get("epsilon", DEFAULT_EPSILON)
    return Call(lambda x, beta, gamma: aten.native_layer_norm.default(x, shape, gamma, beta, epsilon)[0])


def prepare_layer_norm_grad(site: Site) -> Call:
    """Gradients of layer norm. Results: those of input, beta and gamma."""
    shape = _normalized(site, 1, 2, 3)
    epsilon = site.get("epsilon", DEFAULT_EPSILON)

    def layer_norm_grad(
        grad: torch.Tensor, x: torch.Tensor, beta: torch.Tensor, gamma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, mean, rstd = aten.native_layer_norm.default(x, shape, gamma, beta, epsilon)
        dx, dgamma, dbeta = aten.native_layer_norm_backward.default(
            grad, x, shape, mean, rstd, gamma, beta, [True, True, True]
        )
        return dx, dbeta, dgamma

    return Call(layer_norm_grad)


def prepare_l2_norm(site: Site) -> Call:
    dims = [axis_of(site, d, len(site.operands[0].shape)) for d in site.get("dims")]
    keepdim = bool(site.get("keepdim", False))
    if not dims and site.operands[0].shape:
        raise CirhError(f"{site.name}: no dimension to reduce")
    return Call(partial(aten.linalg_vector_norm.default, ord=2, dim=dims, keepdim=keepdim))


def embedding_gradient_in_place(prepare: Callable[[Site], Call], site: Site) -> Call:
    """An embedding's gradient that adds the rows, one after the other as torch does, to a given table.

    torch's own `out=` makes another table and copies it. The bits are torch's in float32 and float64; halves are
    rounded at other points.
    """
    call = prepare(site)
    in_order = site.operands[0].dtype in (torch.float32, torch.float64)
    if not in_order or site.get("padding_idx", -1) >= 0 or site.get("scale_grad_by_freq", False):
        return Call(call.function)

    def add_rows(gradient: torch.Tensor, indices: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.zero_().index_add_(0, indices.reshape(-1), gradient.reshape(-1, out.shape[1]))

    return Call(call.function, add_rows)

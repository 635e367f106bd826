"""Preparing batch norm and group norm as the real dialect has them."""

import math
from typing import Any

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.images import check_format
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo

aten = torch.ops.aten


def epsilon_of(site: Site) -> float:
    """The number that is added to the variance. It has no default, since frameworks have different ones."""
    epsilon = site.get("epsilon")
    if epsilon is None:
        raise CirhError(f"{site.name}: attribute 'epsilon' is missing")
    return float(epsilon)


def _check_channels(site: Site, image: int, weights: range, groups: int | None = None) -> None:
    """Checks that weights have the input's type, and a number for each channel; with `groups` maybe in rows."""
    shape, dtype = site.operands[image]
    check_format(site, len(shape))
    channels = shape[1]
    known = [(channels,)] if groups is None else [(channels,), (groups, channels // groups)]
    for index in weights:
        weight = site.operands[index]
        if weight.shape not in known or weight.dtype is not dtype:
            raise CirhError(
                f"{site.name}: weights {weight} for {site.operands[image]}, which has {channels} channels; they must "
                "be as many, and of its element type"
            )


def prepare_batch_norm(site: Site) -> Call:
    """Batch norm. Operands: x, scale, offset, and the mean and variance for evaluation."""
    _check_channels(site, 0, range(1, 5))
    epsilon, training, exact = epsilon_of(site), bool(site.get("is_training")), _exact(site)
    given, weights = site.operands[0], site.operands[1]
    if site.results != (given, weights, weights):
        raise CirhError(f"{site.name}: its results are not of the types of its operands")

    def batch_norm(
        x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights = [weight.to(exact) for weight in (scale, offset)]
        if training:
            y, batch_mean, rstd = aten._native_batch_norm_legit.no_stats(x, *weights, True, 0.0, epsilon)
            return y, batch_mean.to(scale.dtype), (rstd**-2 - epsilon).to(scale.dtype)
        statistics = [statistic.to(exact) for statistic in (mean, variance)]
        y = aten._native_batch_norm_legit_no_training.default(x, *weights, *statistics, 0.0, epsilon)[0]
        return y, mean, variance

    return Call(batch_norm)


def prepare_batch_norm_grad(site: Site) -> Call:
    """Gradients of batch norm. Results: those of input, scale and offset.

    In evaluation the statistics are not among the operands: the compiler takes those of the norm.
    """
    _check_channels(site, 1, range(2, 3))
    epsilon, exact = epsilon_of(site), _exact(site)
    gradient, given, weights = site.operands
    if gradient != given or site.results != (given, weights, weights):
        raise CirhError(f"{site.name}: its results are not of the types of its operands")

    def batch_norm_grad(gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not site.get("is_training"):
            raise CirhError(f"{site.name}: the gradient by given statistics cannot be executed without the norm itself")
        weight = scale.to(exact)
        _, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.0, epsilon)
        made = aten.native_batch_norm_backward.default(
            gradient, x, weight, None, None, mean, rstd, True, epsilon, [True, True, True]
        )
        return made[0], made[1].to(scale.dtype), made[2].to(scale.dtype)

    return Call(batch_norm_grad)


def group_sizes(site: Site, image: int) -> tuple[int, int, int, int]:
    """The numbers of samples, channels, positions and groups, for torch's own operation."""
    shape = site.operands[image].shape
    groups = site.get("num_groups")
    if groups is None or len(shape) < 2 or groups < 1 or shape[1] % groups:
        raise CirhError(f"{site.name}: {list(shape)} has no {groups} groups of channels")
    return shape[0], shape[1], math.prod(shape[2:]), int(groups)


def _exact(site: Site) -> torch.dtype:
    """The type in which the norm computes."""
    return torch.promote_types(site.operands[0].dtype, torch.float32)


def prepare_group_norm(site: Site) -> Call:
    """Group norm. Operands: input, and both gamma and beta, or neither."""
    if site.segments[1:] not in ((1, 1), (0, 0)):
        raise CirhError(f"{site.name}: takes gamma and beta, or none of them")
    epsilon, sizes, exact = epsilon_of(site), group_sizes(site, 0), _exact(site)
    _check_channels(site, 0, range(1, len(site.operands)), sizes[-1])

    def group_norm(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        gamma, beta = (weight.to(exact).reshape(-1).contiguous() for weight in weights) if weights else (None, None)
        return aten.native_group_norm.default(x.to(exact).contiguous(), gamma, beta, *sizes, epsilon)[0].to(x.dtype)

    return Call(group_norm)


def prepare_group_norm_grad(site: Site) -> Call:
    """Gradients of group norm. Operands: gradient, input, and optionally a scale.

    Results: the gradients of input, and, with a scale, of scale and offset.

    The vendor's client writes no epsilon: the compiler takes the statistics of the norm itself.
    """
    sizes, exact = group_sizes(site, 1), _exact(site)
    _check_channels(site, 1, range(2, len(site.operands)), sizes[-1])

    def group_norm_grad(gradient: torch.Tensor, x: torch.Tensor, *scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        epsilon = epsilon_of(site)
        g, y = gradient.to(exact).contiguous(), x.to(exact).contiguous()
        gamma = next((scale.reshape(-1).to(exact).contiguous() for scale in scales), None)
        _, mean, rstd = aten.native_group_norm.default(y, gamma, None, *sizes, epsilon)
        mask = [True, bool(scales), bool(scales)]
        made = aten.native_group_norm_backward.default(g, y, mean, rstd, gamma, *sizes, mask)
        return made[0].to(x.dtype), *(each.to(s.dtype).reshape(s.shape) for s in scales for each in made[1:])

    return Call(group_norm_grad)


def group_norm_grad_types(site: Site) -> tuple[TensorInfo, ...]:
    """The types of the gradients."""
    _, image, *scales = site.operands
    return (image, *(scale for scale in scales for _ in range(2)))

"""Preparing convolutions, biases and pooling as the real dialect has them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cirh.calls.shape import axis_of
from cirh.dialect.errors import CirhError
from cirh.dialect.spec import Call, Site

aten = torch.ops.aten
# By rank: the batch first, then channels.
_FORMATS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


def check_format(site: Site, rank: int) -> None:
    """CirhError unless a tensor of this rank has its channels in dimension 1."""
    given, known = site.get("data_format"), _FORMATS.get(rank)
    if known is None or given != known:
        raise CirhError(f"{site.name}: data_format {given!r} of a tensor of rank {rank}; {known} is executed")


def _numbers(site: Site, name: str, count: int, least: int) -> tuple[int, ...]:
    values = tuple(site.get(name))
    if len(values) != count or any(value < least for value in values):
        raise CirhError(f"{site.name}: {name} {list(values)} are not {count} numbers from {least} on")
    return values


def _places(
    size: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """At how many places a window stands, in each dimension."""
    each = zip(size, window, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (w - 1) - 1) // s + 1 for n, w, s, p, d in each)


def prepare_convolution(site: Site) -> Call:
    """A convolution (FWD: image, kernel), or its gradient by the image (BWD_INPUT: gradient, kernel) or by the kernel
    (BWD_KERNEL: image, gradient)."""
    first, second = (operand.shape for operand in site.operands)
    result, direction = site.result.shape, site.get("conv_pass_direction")
    orders = {
        "FWD": (first, second, result),
        "BWD_INPUT": (result, second, first),
        "BWD_KERNEL": (first, result, second),
    }
    if direction not in orders:
        raise CirhError(f"{site.name}: conv_pass_direction {direction!r} is none of {', '.join(orders)}")
    if site.get("transposed", False) and direction != "BWD_INPUT":
        raise CirhError(f"{site.name}: {direction} of a transposed convolution is not executed")
    image, kernel, output = orders[direction]
    check_format(site, len(image))
    count = len(image) - 2
    stride, dilation = _numbers(site, "stride", count, 1), _numbers(site, "dilation", count, 1)
    padding, groups = _numbers(site, "padding", count, 0), int(site.get("groups"))
    if len(kernel) != len(image) or groups < 1 or kernel[0] % groups or image[1] != kernel[1] * groups:
        raise CirhError(f"{site.name}: a kernel {list(kernel)} in {groups} groups does not fit {list(image)}")
    made = (image[0], kernel[0], *_places(image[2:], kernel[2:], stride, padding, dilation))
    if output != made:
        raise CirhError(f"{site.name}: {list(image)} convolved with {list(kernel)} is {list(made)}, not {list(output)}")
    if len({site.result.dtype, *(operand.dtype for operand in site.operands)}) > 1:
        raise CirhError(f"{site.name}: operands and result are of different element types")
    if direction == "FWD":
        settings = (None, stride, padding, dilation, False, (0,) * count, groups)
        return Call(lambda x, weight: aten.convolution.default(x, weight, *settings))
    backward = partial(
        _convolution_backward, (None, stride, padding, dilation, False, (0,) * count, groups), image, kernel
    )
    if direction == "BWD_INPUT":
        return Call(lambda gradient, weight: backward(gradient, None, weight)[0])
    return Call(lambda x, gradient: backward(gradient, x, None)[1])


def _convolution_backward(
    settings: tuple[Any, ...],
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> Any:
    """Of the tensor that is not given, torch reads the shape alone."""
    mask = (x is None, weight is None, False)
    x = gradient.new_empty(1).expand(image) if x is None else x
    weight = gradient.new_empty(1).expand(kernel) if weight is None else weight
    return aten.convolution_backward.default(gradient, x, weight, *settings, mask)


def prepare_bias_add(site: Site) -> Call:
    value, bias = site.operands
    dim = axis_of(site, site.get("dim"), len(value.shape))
    if bias.shape != value.shape[dim : dim + 1] or bias.dtype is not value.dtype or site.result != value:
        raise CirhError(f"{site.name}: a bias {bias} does not fit dimension {dim} of {value}")
    view = (-1, *[1] * (len(value.shape) - dim - 1))
    return Call(lambda x, b: x + b.reshape(view))


def prepare_bias_add_grad(site: Site) -> Call:
    (value,) = site.operands
    dim = axis_of(site, site.get("dim"), len(value.shape))
    if site.result != (value.shape[dim : dim + 1], value.dtype):
        raise CirhError(f"{site.name}: the gradient by dimension {dim} of {value} is not {site.result}")
    others = [d for d in range(len(value.shape)) if d != dim]
    return Call(partial(torch.sum, dim=others, dtype=value.dtype) if others else torch.clone)


def prepare_pool(site: Site) -> Call:
    """Maxima or means over windows (operands: the input, twice), or their gradient (operands: the input, the gradient).

    ksize, strides and dilation have a number for each dimension, batch and channels included, padding has two.
    """
    (image, dtype), delta = site.operands
    rank, gradient = len(image), bool(site.get("gradient", False))
    check_format(site, rank)
    ksize, strides, dilation = (_numbers(site, name, rank, 1) for name in ("ksize", "strides", "dilation"))
    padding = _symmetric(site, rank)
    if rank < 4 or any(numbers[:2] != (1, 1) for numbers in (ksize, strides)) or padding[:2] != (0, 0):
        raise CirhError(f"{site.name}: windows over samples or channels are not executed")
    window, stride, pad, step = ksize[2:], strides[2:], padding[2:], dilation[2:]
    made = (*image[:2], *_places(image[2:], window, stride, pad, step))
    said = (delta, site.result) if gradient else (site.result, delta)
    if said != ((made, dtype), (image, dtype)) or any(2 * p > w for p, w in zip(pad, window, strict=True)):
        raise CirhError(f"{site.name}: pooled, {list(image)} is {list(made)}; the types say otherwise")
    kind = site.get("pool_type")
    if kind == "MAX":
        return _maximum(len(window), (window, stride, pad, step, False), gradient)
    if kind != "AVERAGE" or any(pad) or set(step) != {1}:
        raise CirhError(f"{site.name}: {kind} with padding {list(pad)} and dilation {list(step)} is not executed")
    return _average(len(window), (window, stride, pad, False, True), gradient)


def _symmetric(site: Site, rank: int) -> tuple[int, ...]:
    """As much before as behind, in each dimension: both orders of the pairs are known."""
    given = _numbers(site, "padding", 2 * rank, 0)
    for low, high in ((given[::2], given[1::2]), (given[:rank], given[rank:])):
        if low == high:
            return low
    raise CirhError(f"{site.name}: padding {list(given)} is not the same on both sides")


def _maximum(dims: int, settings: tuple[Any, ...], gradient: bool) -> Call:
    """The gradient goes to the first of equal maxima."""
    forward = getattr(aten, f"max_pool{dims}d_with_indices").default
    backward = getattr(aten, f"max_pool{dims}d_with_indices_backward").default
    if not gradient:
        return Call(lambda x, _: forward(x, *settings)[0])
    return Call(lambda x, delta: backward(delta, x, *settings, forward(x, *settings)[1]))


def _average(dims: int, settings: tuple[Any, ...], gradient: bool) -> Call:
    forward = getattr(aten, f"avg_pool{dims}d").default
    backward = getattr(aten, f"avg_pool{dims}d_backward").default
    if not gradient:
        return Call(lambda x, _: forward(x, *settings))
    return Call(lambda x, delta: backward(delta, x, *settings, None))

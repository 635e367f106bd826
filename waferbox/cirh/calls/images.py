"""Preparing convolutions, biases and pooling of the real dialect."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.dialect.spec import Call, Site

aten = torch.ops.aten
_PASSES = ("FWD", "BWD_INPUT", "BWD_KERNEL")
# By rank: batch, channels, then the dimensions of the image.
_FORMATS = {2: ("NC",), 3: ("NCL", "NCW"), 4: ("NCHW",), 5: ("NCDHW",)}


def check_format(site: Site, rank: int) -> None:
    """Raises CirhError unless a tensor of this rank has its channels in dimension 1."""
    given, known = site.get("data_format"), _FORMATS.get(rank)
    if known is None or given not in known:
        formats = ", ".join(name for names in _FORMATS.values() for name in names)
        raise CirhError(
            f"{site.name}: data_format {given!r} of a tensor of rank {rank} is not executed; the channels must be in "
            f"dimension 1 ({formats}): x.transpose(1, -1), x.movedim(-1, 1)"
        )


def _numbers(site: Site, name: str, count: int, least: int) -> tuple[int, ...]:
    values = tuple(site.get(name))
    if len(values) != count or any(value < least for value in values):
        raise CirhError(f"{site.name}: {name} {list(values)} are not {count} numbers from {least} on")
    return values


def _places(
    size: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    is_ceil: bool = False,
) -> tuple[int, ...]:
    """The number of windows in each dimension. is_ceil: whether windows beyond the edge count too, as in torch."""
    places = []
    for n, w, s, p, d in zip(size, window, stride, padding, dilation, strict=True):
        rest = n + 2 * p - d * (w - 1) - 1
        count = (-(-rest // s) if is_ceil else rest // s) + 1
        # A window that begins in the padding behind the image does not count.
        places.append(count - 1 if is_ceil and (count - 1) * s >= n + p else count)
    return tuple(places)


def prepare_convolution(site: Site) -> Call:
    """A pass of a convolution. The forward pass of a transposed one is the image gradient of a plain one.

    FWD and BWD_INPUT (operands: data, kernel) make an output from an image, or, with `transposed`, an image from an
    output: BWD_INPUT has the attribute for a plain convolution, and FWD for a transposed one. BWD_KERNEL makes the
    kernel's gradient (operands: image and gradient of the output; for a transposed one, gradient of the image and
    output).
    """
    first, second = (operand.shape for operand in site.operands)
    result, direction = site.result.shape, site.get("conv_pass_direction")
    if direction not in _PASSES:
        raise CirhError(f"{site.name}: conv_pass_direction {direction!r} is none of {', '.join(_PASSES)}")
    is_transposed = bool(site.get("transposed", False))
    if direction == "BWD_KERNEL":
        image, kernel, output = first, result, second
    else:
        image, kernel, output = (result, second, first) if is_transposed else (first, second, result)
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
    settings = (None, stride, padding, dilation, False, (0,) * count, groups)
    backward = partial(_convolution_backward, settings, image, kernel)
    if direction == "BWD_KERNEL":
        return Call(lambda x, gradient: backward(gradient, x, None)[1])
    if is_transposed:
        return Call(lambda gradient, weight: backward(gradient, None, weight)[0])
    return Call(lambda x, weight: aten.convolution.default(x, weight, *settings))


def _convolution_backward(
    settings: tuple[Any, ...],
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> Any:
    """The gradient by torch, which reads only the shape of the tensor that is not given."""
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

    ksize, strides and dilation have one number for each dimension, batch and channels included; padding has two.
    """
    (image, dtype), delta = site.operands
    rank, gradient = len(image), bool(site.get("gradient", False))
    check_format(site, rank)
    if 0 in site.get("strides"):
        raise CirhError(
            f"{site.name}: strides of 0 are not executed: so the vendor's client writes adaptive pooling to "
            "more places than there are; write x.repeat_interleave(2, -1) for twice as many"
        )
    ksize, strides, dilation = (_numbers(site, name, rank, 1) for name in ("ksize", "strides", "dilation"))
    padding = _symmetric(site, rank)
    if any(numbers[:2] != (1, 1) for numbers in (ksize, strides)) or padding[:2] != (0, 0):
        raise CirhError(f"{site.name}: windows over samples or channels are not executed")
    window, pad, step = ksize[2:], padding[2:], dilation[2:]
    made, source = (delta, site.result) if gradient else (site.result, delta)
    if made.shape[:2] != image[:2] or len(made.shape) != rank or {made.dtype, source.dtype} != {dtype}:
        raise CirhError(f"{site.name}: {made} is not what {site.operands[0]} is pooled to")
    if source.shape != image or any(2 * p > w for p, w in zip(pad, window, strict=True)):
        raise CirhError(f"{site.name}: padding {list(pad)} of windows {list(window)} over {list(image)}")
    stride, is_ceil = _stride_of(site, image[2:], made.shape[2:], (window, strides[2:], pad, step))
    kind = site.get("pool_type")
    if kind == "MAX":
        return _maximum(len(window), (window, stride, pad, step, is_ceil), gradient)
    if kind != "AVERAGE" or set(step) != {1}:
        raise CirhError(
            f"{site.name}: pool_type {kind} with dilation {list(step)} is not executed; MAX and AVERAGE are"
        )
    if any(pad):
        raise CirhError(
            f"{site.name}: means of windows with padding {list(pad)} are not executed, since the text does not say "
            "whether the padding counts (count_include_pad); where it does, write F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), "
            "...) with padding=0, which is the same"
        )
    return _average(len(window), (window, stride, pad, is_ceil, True), gradient)


def _stride_of(
    site: Site, image: tuple[int, ...], made: tuple[int, ...], settings: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], bool]:
    """The strides of windows, and whether the last windows may exceed the edge (ceil_mode).

    For a script without strides, which means those of the window, the vendor's client writes 1; it never writes
    ceil_mode. The size of the result determines both.
    """
    window, given, pad, step = settings
    found: dict[tuple[int, ...], bool] = {}
    for stride in (given, window) if set(given) == {1} else (given,):
        for is_ceil in (False, True):
            if _places(image, window, stride, pad, step, is_ceil=is_ceil) == made:
                found.setdefault(stride, is_ceil)
    if not found:
        floor = _places(image, window, given, pad, step)
        raise CirhError(
            f"{site.name}: windows {list(window)} with strides {list(given)}, padding {list(pad)} and dilation "
            f"{list(step)} make {list(floor)} of {list(image)}; the type of the result says {list(made)} "
            "(the vendor's client leaves out the dilation of a pooling; slices of x can stand for it)"
        )
    # In a dimension with one window, or with windows of one element, all strides mean the same.
    different = any(w > 1 and count > 1 for w, count in zip(window, made, strict=True))
    if len(found) > 1 and different:
        raise CirhError(
            f"{site.name}: windows {list(window)} make {list(made)} of {list(image)} with stride=1, and also without a "
            "stride but with ceil_mode=True: the text is the same for both, and neither is executed; for the latter "
            "write the stride (stride=2 for windows of 2)"
        )
    return next(iter(found.items()))


def _symmetric(site: Site, rank: int) -> tuple[int, ...]:
    """The padding of each dimension, which must be equal on both sides. Both orders of the pairs are accepted."""
    given = _numbers(site, "padding", 2 * rank, 0)
    for low, high in ((given[::2], given[1::2]), (given[:rank], given[rank:])):
        if low == high:
            return low
    raise CirhError(f"{site.name}: padding {list(given)} is not the same on both sides")


def _maximum(dims: int, settings: tuple[Any, ...], gradient: bool) -> Call:
    """The call for maxima, or for their gradient, which goes to the first of equal maxima."""
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

"""Preparing operations of the real dialect that take a part of a tensor, or place a tensor within another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import tensor_type

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _numbers(site: Site, static: int, name: str, count: int | None = None) -> list[int]:
    """The numbers in a static operand, which must be a list."""
    tensor = site.statics[static].tensor()
    if tensor.is_floating_point() or tensor.dim() > 1 or (count is not None and tensor.numel() != count):
        raise CirhError(f"{site.name}: {name} is not a list of {count if count is not None else 'some'} integers")
    return [int(number) for number in tensor.reshape(-1)]


def _number(site: Site, static: int, name: str) -> int:
    return _numbers(site, static, name, 1)[0]


def prepare_slice(site: Site) -> Call:
    """A slice. Operands: input, begin, size; a size of -1 is the rest."""
    shape = site.operands[0].shape
    begin, size = (_numbers(site, static, name, len(shape)) for static, name in enumerate(("begin", "size")))
    parts = []
    for start, count, whole in zip(begin, size, shape, strict=True):
        end = whole if count == -1 else start + count
        if not 0 <= start <= end <= whole:
            raise CirhError(f"{site.name}: begin {begin} and size {size} are outside of {list(shape)}")
        parts.append(slice(start, end))
    place = tuple(parts)
    return Call(lambda x: x[place])


def strided_place(site: Site, shape: Sequence[int], first: int) -> tuple[slice | int, ...]:
    """The index for begin, end and strides, which are static operands from `first` on, and the masks.

    Raises CirhError where torch has no such index.
    """
    begin, end, strides = (_numbers(site, first + i, name) for i, name in enumerate(("begin", "end", "strides")))
    begin_mask, end_mask, ellipsis, new_axis, shrink = (int(site.get(mask, 0)) for mask in _MASKS)
    if not len(begin) == len(end) == len(strides) <= len(shape) or ellipsis or new_axis or min(strides, default=1) < 1:
        raise CirhError(
            f"{site.name}: begin {begin}, end {end} and strides {strides} with these masks are not executed"
        )
    place: list[slice | int] = []
    for dim, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        if shrink >> dim & 1:
            if not -shape[dim] <= start < shape[dim]:
                raise CirhError(f"{site.name}: {start} is outside of dimension {dim} of {list(shape)}")
            place.append(start)
        else:
            place.append(slice(None if begin_mask >> dim & 1 else start, None if end_mask >> dim & 1 else stop, step))
    return tuple(place)


def prepare_strided_slice(site: Site) -> Call:
    place = strided_place(site, site.operands[0].shape, 0)
    return Call(lambda x: x[place])


def prepare_strided_slice_grad(site: Site) -> Call:
    """The gradient of a strided slice: zeros but for the part. Operands: shape, begin, end, strides, and gradient."""
    shape = _numbers(site, 0, "shape")
    tensor_type(shape, site.operands[-1].dtype)  # raises CirhError for a tensor that is too large
    place, part = strided_place(site, shape, 1), site.operands[-1].shape
    if torch.empty(shape, device="meta")[place].shape != part:
        raise CirhError(f"{site.name}: the part of {shape} is not {list(part)}")

    def strided_slice_grad(gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.new_zeros(shape)
        whole[place] = gradient
        return whole

    return Call(strided_slice_grad)


def padding_of(site: Site) -> tuple[tuple[int, int, int], ...]:
    """The padding of each dimension: elements before, behind, and between two. A negative number cuts elements off."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, between = (tuple(site.get(name)) for name in names)
    rank = len(site.operands[0].shape)
    if not len(low) == len(high) == len(between) == rank or min(between, default=0) < 0:
        raise CirhError(f"{site.name}: padding {[low, high, between]} of a tensor of rank {rank}")
    return tuple(zip(low, high, between, strict=True))


def prepare_pad(site: Site) -> Call:
    shape, dtype = site.operands[0]
    values = {float(value) for value in site.get("constant_values", (0.0,))}
    mode = site.get("padding_mode", "CONSTANT")
    if mode != "CONSTANT" or len(values) != 1:
        raise CirhError(f"{site.name}: padding_mode {mode} with values {sorted(values)} is not executed")
    (value,) = values
    sizes, given, made = [], [], []
    for size, (low, high, between) in zip(shape, padding_of(site), strict=True):
        spread = max(size - 1, 0) * (between + 1) + min(size, 1)
        sizes.append(low + spread + high)
        # The positions of the elements that stay: from `first` on, one in every step, while there is room.
        step, first = between + 1, max(0, -(low // (between + 1)))
        start = low + first * step
        count = max(0, min(size - first, -((start - sizes[-1]) // step)))
        given.append(slice(first, first + count))
        made.append(slice(start, start + count * step, step) if count else slice(0, 0))
    if min(sizes, default=0) < 0:
        raise CirhError(f"{site.name}: more is cut off than {list(shape)} has")
    tensor_type(sizes, dtype)  # raises CirhError for a tensor that is too large
    source, target = tuple(given), tuple(made)

    def pad(x: torch.Tensor) -> torch.Tensor:
        whole = x.new_full(sizes, value)
        whole[target] = x[source]
        return whole

    return Call(pad)


def prepare_unpad(site: Site) -> Call:
    shape, cut = site.operands[0].shape, tuple(site.get("edge_unpadding_high"))
    if len(cut) != len(shape) or any(not 0 <= less <= size for less, size in zip(cut, shape, strict=True)):
        raise CirhError(f"{site.name}: {list(cut)} cannot be cut off from {list(shape)}")
    place = tuple(slice(0, size - less) for less, size in zip(cut, shape, strict=True))
    return Call(lambda x: x[place])


def prepare_repeat(site: Site) -> Call:
    repeats = tuple(site.get("repeats"))
    if len(repeats) < len(site.operands[0].shape) or min(repeats, default=0) < 0:
        raise CirhError(f"{site.name}: repeats {list(repeats)} of a tensor of rank {len(site.operands[0].shape)}")
    return Call(lambda x: x.repeat(repeats))


def prepare_matrix_band_part(site: Site) -> Call:
    """A band around the diagonal of each matrix, by its widths below and above; a negative width is unbounded."""
    if len(site.operands[0].shape) < 2:
        raise CirhError(f"{site.name}: takes matrices")
    lower, upper = _number(site, 0, "num_lower"), _number(site, 1, "num_upper")

    def band(x: torch.Tensor) -> torch.Tensor:
        x = x.tril(upper) if upper >= 0 else x
        return x.triu(-lower) if lower >= 0 else x

    return Call(band)


def prepare_one_hot(site: Site) -> Call:
    """One-hot vectors. Operands: indices, number of classes, the values at the index and elsewhere, the dimension."""
    shape = site.operands[0].shape
    classes, axis = _number(site, 0, "num_class"), _number(site, 3, "axis")
    on, off = (site.statics[static].tensor() for static in (1, 2))
    if on.numel() != 1 or off.numel() != 1 or on.dtype is not off.dtype:
        raise CirhError(f"{site.name}: on_value and off_value are single numbers of one type")
    if not -1 <= axis <= len(shape) or site.operands[0].dtype.is_floating_point or classes < 0:
        raise CirhError(f"{site.name}: {classes} classes in dimension {axis} of {list(shape)}")
    axis %= len(shape) + 1
    tensor_type((*shape[:axis], classes, *shape[axis:]), on.dtype)  # raises CirhError for a tensor that is too large
    view = [1] * (len(shape) + 1)
    view[axis] = classes

    def one_hot(indices: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(classes, device=indices.device).reshape(view)
        return torch.where(indices.unsqueeze(axis) == numbers, on.reshape(()), off.reshape(()))

    return Call(one_hot)


def prepare_running(function: Callable[..., Any], neutral: float) -> Callable[[Site], Call]:
    """A running sum or product. Attributes: exclusive, without the element itself; reverse, from the end."""

    def prepare(site: Site) -> Call:
        shape, dtype = site.operands[0]
        axis, exclusive, reverse = site.get("axis"), bool(site.get("exclusive")), bool(site.get("reverse"))
        if axis is None or not -len(shape) <= axis < len(shape):
            raise CirhError(f"{site.name}: axis {axis} of {list(shape)}")

        def running(x: torch.Tensor) -> torch.Tensor:
            x = x.flip(axis) if reverse else x
            if exclusive and x.shape[axis]:
                rest = x.narrow(axis, 0, x.shape[axis] - 1)
                x = torch.cat([torch.full_like(x.narrow(axis, 0, 1), neutral), rest], axis)
            made = function(x, axis, dtype=dtype)
            return made.flip(axis) if reverse else made

        return Call(running)

    return prepare

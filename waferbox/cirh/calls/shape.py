"""Preparing operations that move, repeat, join or reduce elements."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo


def axis_of(site: Site, value: int, rank: int) -> int:
    """A dimension number. Raises CirhError for a negative or too large one."""
    if not 0 <= value < rank:
        raise CirhError(f"{site.name}: dimension {value} of a tensor of rank {rank}")
    return value


def prepare_reshape(site: Site) -> Call:
    _check_same_type(site)
    shape = site.result.shape
    if math.prod(shape) != math.prod(site.operands[0].shape):
        raise CirhError(f"{site.name}: {list(site.operands[0].shape)} cannot become {list(shape)}")
    return Call(lambda x: x.reshape(shape))


def _check_same_type(site: Site) -> None:
    """Checks that the given result type of an operation has the operand's element type."""
    if site.result.dtype is not site.operands[0].dtype:
        raise CirhError(f"{site.name}: {site.operands[0].dtype} cannot become {site.result.dtype}")


def broadcast_view(operand: TensorInfo, result: TensorInfo, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a broadcast operand in the result's rank, with ones in the dimensions that are repeated."""
    if len(dimensions) != len(operand.shape) or list(dimensions) != sorted(set(dimensions)):
        raise CirhError(
            f"broadcast_dimensions {list(dimensions)} do not name each of {len(operand.shape)} dimensions in order"
        )
    view = [1] * len(result.shape)
    for dimension, size in zip(dimensions, operand.shape, strict=True):
        if not 0 <= dimension < len(view) or size not in (1, result.shape[dimension]):
            raise CirhError(f"{list(operand.shape)} cannot be broadcast to {list(result.shape)} at {list(dimensions)}")
        view[dimension] = size
    return tuple(view)


def prepare_broadcast(site: Site) -> Call:
    _check_same_type(site)
    operand, result = site.operands[0], site.result
    view = broadcast_view(operand, result, tuple(site.get("broadcast_dimensions")))
    shape = result.shape
    # expand aligns shapes at the right, so leading ones need no reshape.
    if view[len(view) - len(operand.shape) :] == operand.shape:
        return Call(lambda x: x.expand(shape))
    return Call(lambda x: x.reshape(view).expand(shape))


def prepare_transpose(site: Site) -> Call:
    permutation = tuple(site.statics[0].tensor().reshape(-1).tolist())
    if sorted(permutation) != list(range(len(site.operands[0].shape))):
        raise CirhError(f"{site.name}: {list(permutation)} does not permute {list(site.operands[0].shape)}")
    if permutation == (1, 0):
        return Call(torch.t)
    return Call(partial(torch.permute, dims=permutation))


def prepare_concat(site: Site) -> Call:
    if not site.operands:
        raise CirhError(f"{site.name}: nothing to join")
    if len({operand.dtype for operand in site.operands}) > 1:
        raise CirhError(f"{site.name}: operands of different element types")
    axis = axis_of(site, site.get("axis", 0), len(site.operands[0].shape))

    def out(*values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.cat(values, axis, out=out)

    return Call(lambda *values: torch.cat(values, axis), out)


def prepare_split(site: Site) -> Call:
    sizes = list(site.get("split_sizes"))
    axis = axis_of(site, site.get("axis"), len(site.operands[0].shape))
    if not sizes or sum(sizes) != site.operands[0].shape[axis] or min(sizes) < 0:
        raise CirhError(f"{site.name}: sizes {sizes} do not make up {site.operands[0].shape[axis]}")
    return Call(lambda x: torch.split_with_sizes(x, sizes, axis))


def prepare_scatter_nd(site: Site) -> Call:
    """A copy of init with the updates added at the indices, which are rows of coordinates."""
    init, indices, updates = site.operands
    depth = indices.shape[-1] if indices.shape else 0
    if not 0 < depth <= len(init.shape) or updates.shape != (*indices.shape[:-1], *init.shape[depth:]):
        raise CirhError(f"{site.name}: shapes {[list(o.shape) for o in site.operands]} do not fit together")
    return Call(lambda x, at, u: x.index_put(at.long().unbind(-1), u, accumulate=True))


def prepare_arange(site: Site) -> Call:
    start, end, step = (
        s.tensor().reshape(()).item() if math.prod(s.tensor().shape) == 1 else None for s in site.statics
    )
    dtype = site.results[0].dtype if site.results else site.operands[0].dtype
    if start is None or end is None or step is None or step == 0:
        raise CirhError(f"{site.name}: start, end and step must be single values and step not 0")
    count = (end - start) / step
    if not 0 <= count < 1 << 24:
        raise CirhError(f"{site.name}: {count} elements from {start} to {end} in steps of {step}")
    return Call(partial(torch.arange, start, end, step, dtype=dtype))


def _many(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of several dimensions, one at a time: the highest first, so that the others keep their numbers."""

    def reduce(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
        for dim in reversed(dims):
            x = function(x, dim, keepdim)
        return x

    return reduce


def _sum(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    return torch.sum(x, dims, keepdim, dtype=x.dtype)


_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ADD": _sum,
    "MAX": torch.amax,
    "MIN": torch.amin,
    "MUL": _many(lambda x, dim, keepdim: torch.prod(x, dim, keepdim, dtype=x.dtype)),
    "AND": _many(torch.all),
    "OR": _many(torch.any),
}
_POSITIONS: Mapping[str, Callable[..., Any]] = {"ARGMAX": torch.argmax, "ARGMIN": torch.argmin}


def prepare_reduce(site: Site) -> Call:
    """A reduction over `dimensions`, of which those in `keep_dims` stay with size 1."""
    operand = site.operands[0]
    dims = tuple(sorted({axis_of(site, d, len(operand.shape)) for d in site.get("dimensions")}))
    kept = set(site.get("keep_dims", ()))
    kind = str(site.get("reduce_kind"))
    if not kept <= set(dims):
        raise CirhError(f"{site.name}: keep_dims {sorted(kept)} are not among the dimensions {list(dims)}")
    if not dims and operand.shape:
        raise CirhError(f"{site.name}: no dimension to reduce")
    if kind in _POSITIONS:
        return _prepare_position(site, kind, dims, bool(kept))
    function = _REDUCTIONS.get(kind)
    if function is None:
        raise CirhError(f"{site.name}: reduce_kind {kind!r} is none of {', '.join([*_REDUCTIONS, *_POSITIONS])}")
    if kept and kept != set(dims):
        shape = tuple(1 if d in kept else size for d, size in enumerate(operand.shape) if d not in dims or d in kept)
        return Call(lambda x: function(x, dims, False).reshape(shape))
    keepdim = bool(kept)
    if not dims:
        return Call(lambda x: x.clone())
    if kind == "ADD" and operand.dtype.is_floating_point:
        return Call(*[partial(torch.sum, dim=dims, keepdim=keepdim)] * 2)
    if kind in ("MAX", "MIN"):
        return Call(*[partial(function, dim=dims, keepdim=keepdim)] * 2)
    return Call(lambda x: function(x, dims, keepdim))


def _prepare_position(site: Site, kind: str, dims: tuple[int, ...], keepdim: bool) -> Call:
    function = _POSITIONS[kind]
    if len(dims) != 1:
        raise CirhError(f"{site.name}: {kind} takes one dimension, not {list(dims)}")
    dtype = site.results[0].dtype if site.results else torch.int64
    if dtype is torch.int64:
        return Call(*[partial(function, dim=dims[0], keepdim=keepdim)] * 2)
    if dtype.is_floating_point or dtype is torch.bool:
        raise CirhError(f"{site.name}: {kind} makes integers, not {dtype}")
    return Call(lambda x: function(x, dims[0], keepdim).to(dtype))

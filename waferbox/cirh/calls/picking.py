"""Preparing operations of the real dialect that pick elements by number, or write to picked ones."""

import math

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.dialect.spec import Call, Site

_REDUCTIONS = {"ADD": "sum", "MUL": "prod", "MAX": "amax", "MIN": "amin"}


def picks_elements(site: Site) -> bool:
    """Whether a Gather is torch.gather: its result has the shape of the indices, and not rows for each index."""
    source, indices = (operand.shape for operand in site.operands)
    alike = len(source) == len(indices) > 1 and not site.get("batch_dims", 0)
    return alike and bool(site.results) and site.result.shape == indices


def prepare_gather(site: Site) -> Call:
    """Picks elements of dimension `axis`, or is torch.gather, by the type of the result.

    The indices are the same for all (batch_dims 0), or differ along the first dimensions.
    """
    if picks_elements(site):
        return _prepare_gather_of_elements(site)
    source, indices = (operand.shape for operand in site.operands)
    batch, axis = int(site.get("batch_dims", 0)), axis_of(site, site.get("axis", 0), len(source))
    if not 0 <= batch <= min(axis, len(indices)) or source[:batch] != indices[:batch]:
        raise CirhError(f"{site.name}: {list(indices)} for {list(source)} with batch_dims {batch}")
    shape = (*source[:axis], *indices[batch:], *source[axis + 1 :])
    if batch == 0:
        return Call(lambda x, at: torch.index_select(x, axis, at.reshape(-1)).reshape(shape))
    rows, before, behind = (
        math.prod(source[part]) for part in (slice(batch), slice(batch, axis), slice(axis + 1, None))
    )
    count = math.prod(indices[batch:])

    def gather(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        indices = at.long().reshape(rows, 1, count, 1).expand(rows, before, count, behind)
        return x.reshape(rows, before, source[axis], behind).gather(2, indices).reshape(shape)

    return Call(gather)


def _prepare_gather_of_elements(site: Site) -> Call:
    source, indices = (operand.shape for operand in site.operands)
    axis = axis_of(site, site.get("axis", 0), len(source))
    if any(i > s for dim, (i, s) in enumerate(zip(indices, source, strict=True)) if dim != axis):
        raise CirhError(f"{site.name}: {list(indices)} for elements of {list(source)} along dimension {axis}")
    return Call(lambda x, at: x.gather(axis, at.long()))


def prepare_gather_nd(site: Site) -> Call:
    """Picks elements by rows of coordinates. Both operands have the first `start_dim` dimensions."""
    source, indices = (operand.shape for operand in site.operands)
    batch = int(site.get("start_dim", 0))
    depth = indices[-1] if indices else 0
    if not 0 <= batch < len(indices) or source[:batch] != indices[:batch] or not 0 < depth <= len(source) - batch:
        raise CirhError(f"{site.name}: {list(indices)} for {list(source)} behind {batch} dimensions")

    def gather_nd(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        views = [[-1 if d == dim else 1 for d in range(len(indices) - 1)] for dim in range(batch)]
        counters = [torch.arange(source[dim], device=x.device).reshape(view) for dim, view in enumerate(views)]
        return x[(*counters, *at.long().unbind(-1))]

    return Call(gather_nd)


def prepare_scatter(site: Site) -> Call:
    """A copy of init with updates at indices of dimension `axis`, which replace elements or are combined with them."""
    init, indices, updates = site.operands
    axis, kind = axis_of(site, site.get("axis", 0), len(init.shape)), site.get("reduce_kind", "NONE")
    fits = len(indices.shape) == len(init.shape) and all(
        count <= size for dim, (count, size) in enumerate(zip(indices.shape, init.shape, strict=True)) if dim != axis
    )
    if not fits or indices.shape != updates.shape or updates.dtype is not init.dtype:
        raise CirhError(f"{site.name}: shapes {[list(o.shape) for o in site.operands]} do not fit together")
    if kind == "NONE":
        return Call(lambda x, at, u: x.scatter(axis, at.long(), u))
    if kind == "ADD":
        return Call(lambda x, at, u: x.scatter_add(axis, at.long(), u))
    reduction = _REDUCTIONS.get(str(kind))
    if reduction is None:
        raise CirhError(f"{site.name}: reduce_kind {kind!r} is none of NONE, {', '.join(_REDUCTIONS)}")
    return Call(lambda x, at, u: x.scatter_reduce(axis, at.long(), u, reduction))


def prepare_topk(site: Site) -> Call:
    """Results: the k largest or smallest along a dimension, and their indices; any of equal elements may be taken."""
    shape, dtype = site.operands[0]
    dim, k = axis_of(site, site.get("dimension"), len(shape)), int(site.get("k"))
    largest, in_order = bool(site.get("largest", True)), bool(site.get("sorted", True))
    made = (*shape[:dim], k, *shape[dim + 1 :])
    index_type = site.results[1].dtype if len(site.results) == 2 else None
    if (
        index_type not in (torch.int64, torch.int32)
        or site.results != ((made, dtype), (made, index_type))
        or not 0 <= k <= shape[dim]
    ):
        raise CirhError(f"{site.name}: the {k} largest of {list(shape)} are not what its results say")

    def topk(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, k, dim, largest, in_order)
        return values, indices.to(index_type)

    return Call(topk)

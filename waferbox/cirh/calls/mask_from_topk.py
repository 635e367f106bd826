"""Preparing cirh.MaskFromTopK."""

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.highest_elements import mask_from_topk
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import TensorInfo


def prepare_mask_from_topk(site: Site) -> Call:
    (shape, _), (counts, kind) = site.operands
    axis = axis_of(site, site.get("dimension"), len(shape))
    if kind.is_floating_point or kind.is_complex or kind is torch.bool:
        raise CirhError(f"{site.name}: k is {kind}, not of integers")
    if counts and counts != (*shape[:axis], 1, *shape[axis + 1 :]):
        raise CirhError(f"{site.name}: k of shape {list(counts)} for an input of shape {list(shape)}")
    return Call(lambda input, k: mask_from_topk(input, k, axis))


def mask_types(site: Site) -> tuple[TensorInfo, ...]:
    """The type of the mask, which has a truth value for each element."""
    return (TensorInfo(site.operands[0].shape, torch.bool),)

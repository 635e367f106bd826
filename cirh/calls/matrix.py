"""Preparing matrix products."""

import math
from collections.abc import Callable
from typing import Any

import torch

from cirh.calls.shape import axis_of
from cirh.dialect.errors import CirhError
from cirh.dialect.spec import Call, Site


def _left(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b)


def _left_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b, out=out)


def _right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b.t())


def _right_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b.t(), out=out)


def _both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b.t())


def _both_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b.t(), out=out)


_MATMULS = {
    (False, False): Call(torch.mm, torch.mm),
    (True, False): Call(_left, _left_out),
    (False, True): Call(_right, _right_out),
    (True, True): Call(_both, _both_out),
}


def prepare_matmul(site: Site) -> Call:
    a, b = site.operands
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise CirhError(f"{site.name}: operands of rank {len(a.shape)} and {len(b.shape)}; both must be matrices")
    return _MATMULS[bool(site.get("transpose_a", False)), bool(site.get("transpose_b", False))]


def _ordered(site: Site, side: int, prefix: str) -> tuple[list[int], list[int], list[int]]:
    """Batching, free and contracting dimensions of one operand."""
    rank = len(site.operands[side].shape)
    batch = [axis_of(site, d, rank) for d in site.get(f"{prefix}_batching_dimensions")]
    contract = [axis_of(site, d, rank) for d in site.get(f"{prefix}_contracting_dimensions")]
    if len({*batch, *contract}) != len(batch) + len(contract):
        raise CirhError(f"{site.name}: a dimension of {prefix} is named twice")
    return batch, [d for d in range(rank) if d not in batch and d not in contract], contract


def prepare_dot_general(site: Site) -> Call:
    """Batched product of matrices; the result's dimensions are: batching, free ones of lhs, free ones of rhs."""
    lhs, rhs = (operand.shape for operand in site.operands)
    lhs_batch, lhs_free, lhs_contract = _ordered(site, 0, "lhs")
    rhs_batch, rhs_free, rhs_contract = _ordered(site, 1, "rhs")
    batch = [lhs[d] for d in lhs_batch]
    contract = [lhs[d] for d in lhs_contract]
    if batch != [rhs[d] for d in rhs_batch] or contract != [rhs[d] for d in rhs_contract]:
        raise CirhError(f"{site.name}: {list(lhs)} and {list(rhs)} do not fit together")
    leading = list(range(len(batch)))
    if lhs_batch == leading and rhs_batch == leading and len(lhs_free) == len(rhs_free) == len(contract) == 1:
        left_last, right_first = lhs_contract[0] == len(lhs) - 1, rhs_contract[0] == len(rhs) - 2
        return Call(_batched(left_last, right_first))
    left = (math.prod(batch), math.prod(lhs[d] for d in lhs_free), math.prod(contract))
    right = (left[0], left[2], math.prod(rhs[d] for d in rhs_free))
    shape = (*batch, *(lhs[d] for d in lhs_free), *(rhs[d] for d in rhs_free))
    left_order, right_order = lhs_batch + lhs_free + lhs_contract, rhs_batch + rhs_contract + rhs_free

    def general(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.bmm(a.permute(left_order).reshape(left), b.permute(right_order).reshape(right))
        return product.reshape(shape)

    return Call(general)


def _batched(left_last: bool, right_first: bool) -> Callable[..., Any]:
    if left_last and right_first:
        return torch.matmul
    if left_last:
        return lambda a, b: torch.matmul(a, b.mT)
    if right_first:
        return lambda a, b: torch.matmul(a.mT, b)
    return lambda a, b: torch.matmul(a.mT, b.mT)

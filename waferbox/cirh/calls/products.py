"""Preparing matrix products, with the library that is faster on this processor, and with float32 for some halves."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.shape import axis_of
from waferbox.cirh.dialect.spec import Call, Site

# --- Products of halves -----------------------------------------------------------------------------------------------
#
# On a CPU without products of halves these are computed in float32 and rounded once, as an accelerator does. torch's
# own loops take up to 70 times as long (`python -m benchmarks products`): for float16 on all processors that were
# tried, for bfloat16 on those without AVX-512.


Prepare = Callable[[Site], Call]


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch's library has products of bfloat16 for this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_by_float32(dtype: torch.dtype) -> bool:
    """Whether products of this type are computed in float32."""
    return dtype is torch.float16 or (dtype is torch.bfloat16 and not multiplies_bfloat16())


def in_float32(prepare: Prepare) -> Prepare:
    """A function that prepares the same call; halves go through float32 where that is faster."""

    def prepare_by_type(site: Site) -> Call:
        call = prepare(site)
        half = next((operand.dtype for operand in site.operands if is_by_float32(operand.dtype)), None)
        if half is None:
            return call

        def function(*operands: torch.Tensor) -> Any:
            results = call.function(*[x.float() if x.dtype is half else x for x in operands])
            if isinstance(results, torch.Tensor):
                return results.to(half)
            return tuple(result if result is None else result.to(half) for result in results)

        def out(*operands: torch.Tensor, out: torch.Tensor | Sequence[torch.Tensor | None]) -> Any:
            results = function(*operands)
            if isinstance(out, torch.Tensor):
                return out.copy_(results)
            return tuple(r if place is None else place.copy_(r) for r, place in zip(results, out, strict=True))

        return Call(function, out if call.out is not None else None)

    return prepare_by_type


# --- Products of large float32 matrices -------------------------------------------------------------------------------
#
# torch multiplies float32 matrices with MKL, which does not use AVX-512 on AMD's processors. There oneDNN, which torch
# has for convolutions and halves, takes half of the time (`python -m benchmarks products`). The processor and the
# shapes decide, and never a measurement, since a repeated computation has to give the same bits.


# The least size of all three dimensions. With less, oneDNN's dozen of microseconds for a call is more than it saves.
_LEAST_SIDE: Final = 32
_LEAST_FLOPS: Final = 4 << 20


@cache
def onednn_is_faster() -> bool:
    """Whether this processor multiplies float32 matrices faster with oneDNN than with MKL."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("vendor_id") and line.endswith("AuthenticAMD") for line in lines)


def is_large_product(site: Site) -> bool:
    """Whether an operation is a large float32 product, and oneDNN is faster with these on this processor."""
    if not _is_plain_product(site):
        return False
    a, b = (operand.shape for operand in site.operands[-2:])
    rows, inner = a[::-1] if site.get("transpose_a", False) else a
    second, columns = b[::-1] if site.get("transpose_b", False) else b
    large = min(rows, inner, columns) >= _LEAST_SIDE and 2 * rows * inner * columns >= _LEAST_FLOPS
    return inner == second and large


def by_processor(prepare: Prepare) -> Prepare:
    """A function that prepares the same product, by oneDNN where that is faster."""

    def prepare_by_processor(site: Site) -> Call:
        call = prepare(site)
        if not onednn_is_faster() or not is_large_product(site):
            return call
        product = _with_bias if site.name == "aten.addmm" else _product(site)

        def out(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out.copy_(product(*operands))

        return Call(product, out)

    return prepare_by_processor


def _is_plain_product(site: Site) -> bool:
    if any(operand.dtype is not torch.float32 for operand in site.operands):
        return False
    if site.name != "aten.addmm":
        return site.name in ("cirh.MatMul", "aten.mm") and all(len(operand.shape) == 2 for operand in site.operands)
    bias, a, b = (operand.shape for operand in site.operands)
    plain = len(a) == len(b) == 2 and bias == b[1:]
    return plain and site.get("alpha", 1) == site.get("beta", 1) == 1


def _with_bias(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    return _by_onednn(a, b.t(), bias)


def _product(site: Site) -> Callable[..., Any]:
    transpose_a, transpose_b = bool(site.get("transpose_a", False)), bool(site.get("transpose_b", False))

    def product(a: torch.Tensor, b: torch.Tensor) -> Any:
        return _by_onednn(a.t() if transpose_a else a, b if transpose_b else b.t(), None)

    return product


def _by_onednn(rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """The products of all rows with all columns, which are given as rows too."""
    if not columns.is_contiguous() and not columns.t().is_contiguous():
        columns = columns.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(rows, columns, bias, "none", [], "")


# --- Products of the dialect ------------------------------------------------------------------------------------------


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
    """The batching, free and contracting dimensions of one operand."""
    rank = len(site.operands[side].shape)
    batch = [axis_of(site, d, rank) for d in site.get(f"{prefix}_batching_dimensions")]
    contract = [axis_of(site, d, rank) for d in site.get(f"{prefix}_contracting_dimensions")]
    if len({*batch, *contract}) != len(batch) + len(contract):
        raise CirhError(f"{site.name}: a dimension of {prefix} is named twice")
    return batch, [d for d in range(rank) if d not in batch and d not in contract], contract


def prepare_dot_general(site: Site) -> Call:
    """A batched product of matrices. The result's dimensions: batching, free ones of lhs, free ones of rhs."""
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

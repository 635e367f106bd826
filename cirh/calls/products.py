"""Products of large float32 matrices: by the library of torch's that is the faster one on this processor.

torch multiplies float32 matrices with MKL. On processors of AMD that have AVX-512, MKL does not use it: oneDNN, which
torch has for convolutions and halves, does the same product in half of the time (`python -m benchmarks products`). The
processor and the shapes decide, never a measurement: what is computed again has to give the same bits.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from cirh.calls.half_products import Prepare
from cirh.dialect.spec import Call, Site

# Of all three dimensions: below, oneDNN's dozen of microseconds for a call is more than it saves.
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
    """Whether an operation is a product of float32 matrices that are worth oneDNN, where that is the faster one."""
    if not _is_plain_product(site):
        return False
    a, b = (operand.shape for operand in site.operands[-2:])
    rows, inner = a[::-1] if site.get("transpose_a", False) else a
    second, columns = b[::-1] if site.get("transpose_b", False) else b
    large = min(rows, inner, columns) >= _LEAST_SIDE and 2 * rows * inner * columns >= _LEAST_FLOPS
    return inner == second and large


def by_processor(prepare: Prepare) -> Prepare:
    """Prepares the same product, by oneDNN where it is large and the processor is faster so."""

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
    """The products of all rows with all columns, each given as a row."""
    if not columns.is_contiguous() and not columns.t().is_contiguous():
        columns = columns.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(rows, columns, bias, "none", [], "")

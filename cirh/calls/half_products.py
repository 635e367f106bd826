"""Products of half-precision matrices on a CPU without such products: computed in float32, and rounded once.

That is what an accelerator does. torch's own loops take up to 70 times as long (`python -m benchmarks products`): for
float16 on all processors that were tried, for bfloat16 on those without AVX-512.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cirh.dialect.spec import Call, Site

Prepare = Callable[[Site], Call]


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch's library has products of bfloat16 for this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_by_float32(dtype: torch.dtype) -> bool:
    """Whether products of this type are computed in float32."""
    return dtype is torch.float16 or (dtype is torch.bfloat16 and not multiplies_bfloat16())


def in_float32(prepare: Prepare) -> Prepare:
    """Prepares the same call, for halves by way of float32 where that is faster."""

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

        def out(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out.copy_(function(*operands))

        return Call(function, out if call.out is not None else None)

    return prepare_by_type

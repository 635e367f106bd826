"""Products of float16 matrices on a CPU: computed in float32, as an accelerator does, and rounded once.

torch's own loops for float16 are up to 70 times slower than that on processors without such products.
"""

from collections.abc import Callable
from typing import Any

import torch

from cirh.dialect.spec import Call, Site

Prepare = Callable[[Site], Call]


def in_float32(prepare: Prepare) -> Prepare:
    """Prepares the same call, for float16 operands by way of float32."""

    def prepare_by_type(site: Site) -> Call:
        call = prepare(site)
        if not any(operand.dtype is torch.float16 for operand in site.operands):
            return call

        def function(*operands: torch.Tensor) -> Any:
            results = call.function(*[x.float() if x.dtype is torch.float16 else x for x in operands])
            if isinstance(results, torch.Tensor):
                return results.half()
            return tuple(result if result is None else result.half() for result in results)

        def out(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out.copy_(function(*operands))

        return Call(function, out if call.out is not None else None)

    return prepare_by_type

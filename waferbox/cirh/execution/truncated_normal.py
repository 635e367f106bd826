"""`trunc_normal_` as one operator, so that a program of initialisation can name it."""

import math
from typing import Final

import torch
from torch._ops import OpOverload

_library = torch.library.Library("waferbox", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "trunc_normal_(Tensor(a!) self, float mean, float std, float a, float b, *, Generator? generator=None)"
    " -> Tensor(a!)"
)

# torch draws normal numbers if at least this share of them is within the bounds, and uniform ones otherwise.
_LEAST_SHARE = 0.3


def draws_normal(mean: float, std: float, a: float, b: float) -> bool:
    """Whether torch draws normal numbers between the bounds a and b, in a few rounds."""
    if not all(map(math.isfinite, (mean, std, a, b))) or std <= 0:
        return False
    return 0.5 * (math.erf((b - mean) / std / math.sqrt(2)) - math.erf((a - mean) / std / math.sqrt(2))) > _LEAST_SHARE


def _on_cpu(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    if not draws_normal(mean, std, a, b):
        raise ValueError(f"a truncated normal distribution of {mean}, {std} between {a} and {b} has too few numbers")
    return torch.nn.init.trunc_normal_(tensor, mean, std, a, b, generator)


def _on_meta(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    return tensor


_library.impl("trunc_normal_", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("trunc_normal_", _on_meta, "Meta")  # type: ignore[no-untyped-call]

TRUNCATED_NORMAL: Final[OpOverload] = torch.ops.waferbox.trunc_normal_.default

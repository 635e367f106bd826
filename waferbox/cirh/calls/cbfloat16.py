"""cbfloat16, emulated in float32 tensors that hold only its values: 1 sign, 6 exponent (bias 31) and 9 mantissa bits.

Neither float16 nor bfloat16 can hold it: float16 has fewer exponent bits, and bfloat16 fewer mantissa bits.
"""

from typing import Final

import torch

LARGEST: Final = (2 - 2**-9) * 2.0**31
# Below the smallest normal number, 2**-30, all numbers are multiples of 2**-39.
_SMALLEST_NORMAL: Final = 2.0**-30
# In float32, numbers from this one to its double are multiples of 2**-39: adding it rounds to subnormal numbers.
_SUBNORMAL_UNIT: Final = 2.0**-16
_DROPPED_BITS: Final = 23 - 9
_SIGN: Final = -(1 << 31)


def round_to_cbfloat16(x: torch.Tensor) -> torch.Tensor:
    """The nearest cbfloat16 values of a float32 tensor, in float32: ties go to even, and overflow to infinity."""
    return round_to_cbfloat16_out(x, out=torch.empty_like(x))


def round_to_cbfloat16_out(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """As `round_to_cbfloat16`, but writes to `out`, which may be `x`."""
    bits = x.view(torch.int32)
    sign = bits & _SIGN
    magnitude = bits & ~_SIGN
    # Adds half of the last bit that is kept, less one where that bit is even; a carry goes into the exponent.
    rounded = (magnitude >> _DROPPED_BITS).bitwise_and_(1).add_(magnitude).add_((1 << (_DROPPED_BITS - 1)) - 1)
    rounded.bitwise_and_(-(1 << _DROPPED_BITS))
    value, size = rounded.view(torch.float32), magnitude.view(torch.float32)
    value.masked_fill_(value > LARGEST, torch.inf)
    value = torch.where(size < _SMALLEST_NORMAL, (size + _SUBNORMAL_UNIT).sub_(_SUBNORMAL_UNIT), value)
    value.masked_fill_(size.isnan(), torch.nan)
    torch.bitwise_or(value.view(torch.int32), sign, out=out.view(torch.int32))
    return out

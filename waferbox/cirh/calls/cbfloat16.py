"""cbfloat16, emulated: 1 sign, 6 exponent (bias 31) and 9 mantissa bits, in float32 tensors that hold such values only.

Its exponents reach further than float16's and its mantissa further than bfloat16's, so that neither can hold it.
"""

from typing import Final

import torch

LARGEST: Final = (2 - 2**-9) * 2.0**31
# Below the smallest normal number, 2**-30, all numbers are multiples of 2**-39.
_SMALLEST_NORMAL: Final = 2.0**-30
# Numbers from here to twice as much are multiples of 2**-39 in float32: adding it rounds as a subnormal number does.
_SUBNORMAL_UNIT: Final = 2.0**-16
_DROPPED_BITS: Final = 23 - 9
_SIGN: Final = -(1 << 31)


def round_to_cbfloat16(x: torch.Tensor) -> torch.Tensor:
    """The nearest cbfloat16 values, the even one of two; infinity beyond the largest. float32 in and out."""
    return round_to_cbfloat16_out(x, out=torch.empty_like(x))


def round_to_cbfloat16_out(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The same, written to `out`, which may be `x`."""
    bits = x.view(torch.int32)
    sign = bits & _SIGN
    magnitude = bits & ~_SIGN
    # Half of the last bit that stays, less one where it is even already; a carry moves on into the exponent.
    rounded = (magnitude >> _DROPPED_BITS).bitwise_and_(1).add_(magnitude).add_((1 << (_DROPPED_BITS - 1)) - 1)
    rounded.bitwise_and_(-(1 << _DROPPED_BITS))
    value, size = rounded.view(torch.float32), magnitude.view(torch.float32)
    value.masked_fill_(value > LARGEST, torch.inf)
    value = torch.where(size < _SMALLEST_NORMAL, (size + _SUBNORMAL_UNIT).sub_(_SUBNORMAL_UNIT), value)
    value.masked_fill_(size.isnan(), torch.nan)
    torch.bitwise_or(value.view(torch.int32), sign, out=out.view(torch.int32))
    return out

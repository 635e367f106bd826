"""cstorch.amp, and release 2.0's way to ask for bfloat16."""

from cstorch.amp import set_half_dtype
from cstorch.generations import inherit

__all__ = ["use_bfloat16"]

__getattr__ = inherit("cerebras_pytorch.amp", "cstorch.amp")


def use_bfloat16(value: bool = True) -> None:
    """Makes bfloat16 the half type, or float16 again."""
    set_half_dtype("bfloat16" if value else "float16")

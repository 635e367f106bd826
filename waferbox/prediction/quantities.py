"""Parses rates and sizes with units, as data sheets have them. `appliance/drawing/number_text.py` prints numbers."""

import math
import re
from collections.abc import Mapping
from typing import Final

_NUMBER: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(\S*)", re.ASCII)
_PREFIXES: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BITS: Final = {f"{prefix}b/s": scale / 8 for prefix, scale in _PREFIXES.items()}
_BYTES: Final = {f"{prefix}B/s": scale for prefix, scale in _PREFIXES.items()}
_FLOPS: Final = {f"{prefix}flop/s": scale for prefix, scale in _PREFIXES.items()}
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SIZES: Final = {f"{prefix}B": scale for prefix, scale in _PREFIXES.items()}


class QuantityError(ValueError):
    """Raised for a text that is not a quantity of the expected kind. The message shows how to write one."""


def bytes_per_second(text: str) -> float:
    """Parses a rate of bytes, such as "10GB/s", or of bits, such as "100Gb/s"."""
    return _quantity(text, {**_BITS, **_BYTES}, "a rate such as 100Gb/s (bits) or 10GB/s (bytes)")


def flops_per_second(text: str) -> float:
    """Parses a rate of arithmetic, such as "312Tflop/s"."""
    return _quantity(text, _FLOPS, "a rate of arithmetic such as 312Tflop/s")


def seconds(text: str) -> float:
    """Parses a duration, such as "20us"; "0s" is allowed."""
    return _quantity(text, _SECONDS, "a time such as 20us", zero=True)


def size_bytes(text: str) -> int:
    """Parses a size, such as "40GB", in decimal units."""
    return int(_quantity(text, _SIZES, "a size such as 40GB"))


def _quantity(text: str, units: Mapping[str, float], wanted: str, *, zero: bool = False) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise QuantityError(f"{text!r} is not {wanted}")
    if found[2] not in units:
        unit = f"the unit {found[2]!r} is unknown" if found[2] else "a unit is missing"
        raise QuantityError(f"{text!r} is not {wanted}: {unit}; units are {', '.join(units)}")
    value = float(found[1]) * units[found[2]]
    if math.isinf(value) or (value <= 0 and not zero):
        raise QuantityError(f"{text!r} is not {wanted}: it must be more than zero, and finite")
    return value

"""Numbers as text for people: three significant digits, and a unit."""

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def bytes_text(nbytes: float) -> str:
    """Bytes in binary units, such as "27.5 MiB"."""
    return _scaled(nbytes, 1024, _BINARY)


def count_text(count: float) -> str:
    """A count in decimal units, such as "124 M"."""
    return _scaled(count, 1000, _DECIMAL).rstrip()


def seconds_text(seconds: float) -> str:
    """A duration, such as "3.42 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds / 1e-9:.3g} ns"


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    size = 0
    # From 999.5 on, three digits would round up to 1000 (or 1e+03): the next unit is used instead.
    while number >= 999.5 and size + 1 < len(units):
        number /= base
        size += 1
    return f"{number:.3g} {units[size]}"

"""Sizes of memory on a command line."""

import re
from typing import Final

UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """The bytes that a text such as "512m" or "8g" stands for, as container engines read it.

    Raises:
        ValueError: it is not a size, or is none.
    """
    match = re.fullmatch(r"([0-9]+)([kmgt]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"a size is a number with k, m, g or t behind it, such as 512m or 8g, not {text!r}")
    return int(match[1]) * UNITS[match[2]]

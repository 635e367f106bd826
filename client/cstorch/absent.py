"""What the real API has and Waferbox has not, and what to do instead. docs/compatibility.md shows the same."""

from collections.abc import Mapping

_REASONS: Mapping[str, str] = {}


def reason(name: str) -> str | None:
    """Why `cstorch.x.y` is absent, as a sentence for the user; None for a name that is not known to be."""
    known = name
    while known not in _REASONS:
        known, dot, _ = known.rpartition(".")
        if not dot:
            return None
    return f"{name} is not part of Waferbox: {_REASONS[known]}"

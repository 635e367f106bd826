"""Where processes keep what they need not make twice."""

import os
from pathlib import Path

CACHE_VARIABLE = "WAFERBOX_CACHE"


def cache_root() -> Path:
    """$WAFERBOX_CACHE, or the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waferbox"

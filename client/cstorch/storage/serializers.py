"""Switches for reading and writing checkpoints. No number depends on them."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cache_deferred_tensors", "use_external_link"]


class Switch:
    """A boolean that is set temporarily: `with use_external_link(True):`."""

    def __init__(self, default: bool) -> None:
        self.value = default

    def __bool__(self) -> bool:
        return self.value

    @contextmanager
    def __call__(self, value: bool) -> Iterator[None]:
        """Sets the boolean within a `with` block."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


# `cstorch.load(map_location="cache")` keeps what was read; a checkpoint always holds its tensors itself.
cache_deferred_tensors = Switch(True)
use_external_link = Switch(False)

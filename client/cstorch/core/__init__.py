"""Names and annotations of the graph."""

from cstorch.core import annotation, modes, name_scope

__all__ = ["annotation", "modes", "name_scope"]

"""Names and annotations of the graph."""

from cstorch.core import annotation, name_scope

__all__ = ["annotation", "name_scope"]

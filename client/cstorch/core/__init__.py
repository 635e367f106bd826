"""The traced step, closures, tensors of one value, and names of the graph."""

from cstorch.core import annotation, modes, name_scope

__all__ = ["annotation", "modes", "name_scope"]

"""What a script says around its model: the traced step, closures, tensors of one value, names of the graph."""

from cstorch.core import annotation, name_scope

__all__ = ["annotation", "name_scope"]

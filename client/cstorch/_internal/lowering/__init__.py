"""Lowering: from the functional ATen graph of a traced step to one CIRH module."""

from cstorch._internal.lowering.lower import lower

__all__ = ["lower"]

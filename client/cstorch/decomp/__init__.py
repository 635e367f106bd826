"""Decompositions of operations."""

from cstorch.decomp import registry

__all__ = ["registry"]

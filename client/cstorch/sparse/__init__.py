"""Sparse training: parameters of which most elements are zero, and masks that say which."""

from cstorch.sparse.algorithms import GMP, SET, DynamicSparsityAlgorithm, RigL, Static
from cstorch.sparse.base import SparseParameter, SparsityAlgorithm
from cstorch.sparse.configure import (
    SparsityWrapperOptimizer,
    configure,
    configure_sparsity_optimizer,
    map_sparsity_algorithm,
)
from cstorch.sparse.group import Group

__all__ = [
    "GMP",
    "SET",
    "DynamicSparsityAlgorithm",
    "Group",
    "RigL",
    "SparseParameter",
    "SparsityAlgorithm",
    "SparsityWrapperOptimizer",
    "Static",
    "configure",
    "configure_sparsity_optimizer",
    "map_sparsity_algorithm",
]

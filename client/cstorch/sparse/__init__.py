"""Sparse training: parameters of which most elements are zero, and masks that say which."""

from cstorch.sparse.algorithms import GMP, SET, RigL
from cstorch.sparse.base import SparseParameter, SparsityAlgorithm
from cstorch.sparse.configure import configure, map_sparsity_algorithm
from cstorch.sparse.dynamic import DynamicSparsityAlgorithm
from cstorch.sparse.group import Group
from cstorch.sparse.static import Static
from cstorch.sparse.wrapper import SparsityWrapperOptimizer, configure_sparsity_optimizer

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

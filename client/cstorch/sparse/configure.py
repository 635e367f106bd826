"""Sparsity algorithms from a configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from cstorch.sparse.algorithms import GMP, SET, RigL
from cstorch.sparse.base import SparsityAlgorithm, default_sparse_param_filter
from cstorch.sparse.group import Group
from cstorch.sparse.static import Static

__all__ = ["configure", "default_sparse_param_filter", "map_sparsity_algorithm"]

_ALGORITHMS: Mapping[str, type[SparsityAlgorithm]] = {
    algorithm.__name__.lower(): algorithm for algorithm in (Static, GMP, SET, RigL)
}


def map_sparsity_algorithm(algorithm: str) -> type[SparsityAlgorithm]:
    """The class of a name in lower case; ValueError for one that is not known."""
    if algorithm.lower() not in _ALGORITHMS:
        raise ValueError(f"a sparsity algorithm is one of {', '.join(_ALGORITHMS)}, not {algorithm!r}")
    return _ALGORITHMS[algorithm.lower()]


def configure(config: float | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Group:
    """A group of algorithms for a model.

    config: a sparsity, which is static; a dictionary with the name of an "algorithm" (by default "static"), the
        "param_filter" (patterns of names, or a function; by default `default_sparse_param_filter`) and the arguments of
        the algorithm; or a list of such dictionaries, of which the first that chooses a parameter gets it.

    Raises:
        ValueError, TypeError: something in it is not known, or out of its range.
    """
    group = Group()
    if isinstance(config, (int, float)):
        config = {"algorithm": "static", "sparsity": config}
    for each in [config] if isinstance(config, Mapping) else config:
        settings = dict(each)
        filters = settings.pop("param_filter", None) or default_sparse_param_filter
        algorithm = map_sparsity_algorithm(settings.pop("algorithm", "static"))(**settings)
        for filter in [filters] if isinstance(filters, str) or callable(filters) else filters:
            group.add(filter, algorithm)
    return group

"""Sparsity algorithms from a configuration, and as releases 2.0 and 2.1 configure them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cstorch.optim.optimizer import Optimizer
from cstorch.sparse.algorithms import GMP, SET, RigL, Static
from cstorch.sparse.base import SparsityAlgorithm, default_sparse_param_filter
from cstorch.sparse.group import Group

# --- Sparsity algorithms from a configuration -------------------------------------------------------------------------


__all__ = ["configure", "default_sparse_param_filter", "map_sparsity_algorithm"]

_ALGORITHMS: Mapping[str, type[SparsityAlgorithm]] = {
    algorithm.__name__.lower(): algorithm for algorithm in (Static, GMP, SET, RigL)
}


def map_sparsity_algorithm(algorithm: str) -> type[SparsityAlgorithm]:
    """Returns the class of a sparsity algorithm.

    Args:
        algorithm: "static", "gmp", "set" or "rigl", in any case.

    Raises:
        TypeError: The argument is no str.
        ValueError: There is no such algorithm.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"a sparsity algorithm is one of {', '.join(_ALGORITHMS)}, not {algorithm!r}")
    if algorithm.lower() not in _ALGORITHMS:
        raise ValueError(f"a sparsity algorithm is one of {', '.join(_ALGORITHMS)}, not {algorithm!r}")
    return _ALGORITHMS[algorithm.lower()]


def configure(config: float | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Group:
    """Makes a group of sparsity algorithms from a configuration.

    Args:
        config: A sparsity, which is static. Or a dictionary with the name of an "algorithm" (by default "static"), the
            "param_filter" (patterns of names, or a function; by default `default_sparse_param_filter`) and the
            arguments of the algorithm. Or a list of such dictionaries, of which the first that chooses a parameter gets
            it.

    Returns:
        The group, for `model.apply` and `optimizer.apply`.

    Raises:
        TypeError: The configuration is none of these, or the algorithm does not take an argument.
        ValueError: A name is unknown, or a setting is out of range.

    Example:
        ::

            sparsity = cstorch.sparse.configure({"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 100}})
            model.apply(sparsity)
            optimizer.apply(sparsity)

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """
    group = Group()
    if isinstance(config, (int, float)):
        config = {"algorithm": "static", "sparsity": config}
    configs = [config] if isinstance(config, Mapping) else config
    if not isinstance(configs, Sequence) or not all(isinstance(each, Mapping) for each in configs):
        raise TypeError(
            "configure takes a sparsity such as 0.9, a dictionary such as "
            f'{{"algorithm": "static", "sparsity": 0.9}}, or a list of such dictionaries, not {config!r}'
        )
    for each in configs:
        settings = dict(each)
        filters = settings.pop("param_filter", None) or default_sparse_param_filter
        algorithm = map_sparsity_algorithm(settings.pop("algorithm", "static"))(**settings)
        for filter in [filters] if isinstance(filters, str) or callable(filters) else filters:
            group.add(filter, algorithm)
    return group


# --- Sparsity as releases 2.0 and 2.1 configure it --------------------------------------------------------------------


class SparsityOptimizer:
    """A sparsity algorithm for parameters that a configuration names.

    `hook_module(model)` makes them sparse, and `SparsityWrapperOptimizer(optimizer, this)` keeps them so.

    Args:
        algorithm: The group of algorithms.
    """

    def __init__(self, algorithm: Group) -> None:
        self.algorithm = algorithm

    def hook_module(self, module: nn.Module) -> None:
        """Makes the masks, and zeroes what they prune.

        Args:
            module: The model.
        """
        module.apply(self.algorithm)

    def initialize_sparsity(self) -> None:
        """Does nothing: `hook_module` makes the masks."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the algorithm."""
        return self.algorithm.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of the algorithm.

        Args:
            state_dict: What `state_dict` returned.
        """
        self.algorithm.load_state_dict(state_dict)


def configure_sparsity_optimizer(
    sparsity_type: str, named_parameters: Iterable[tuple[str, torch.Tensor]], **kwargs: Any
) -> SparsityOptimizer:
    """Makes the sparsity algorithm of a name, as releases 2.0 and 2.1 configure it.

    Args:
        sparsity_type: "static", "gmp", "set" or "rigl", in any case.
        named_parameters: Those of the model.
        **kwargs: The arguments of the algorithm, and `param_name_patterns`: a regular expression, or several, one of
            which the name of a sparse parameter has. Without it `cstorch.sparse.configure` chooses.

    Raises:
        TypeError: The algorithm does not take an argument.
        ValueError: The name is unknown, or a setting is out of range.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.sparse`.
    """
    settings = {"algorithm": sparsity_type, **kwargs}
    patterns = settings.pop("param_name_patterns", None)
    if patterns is not None:
        expressions = [patterns] if isinstance(patterns, str) else list(patterns)
        chosen = {name for name, _ in named_parameters if any(re.search(each, name) for each in expressions)}
        settings["param_filter"] = lambda name, parameter: name in chosen
    return SparsityOptimizer(configure(settings))


class SparsityWrapperOptimizer:
    """The call that keeps an optimizer's weights sparse. It returns the optimizer itself.

    Args:
        optimizer: An optimizer of cstorch.optim.
        sparsity_optimizer: The sparsity, after `hook_module` was called with the model.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.sparse`.
    """

    def __new__(cls, optimizer: Optimizer, sparsity_optimizer: SparsityOptimizer) -> Optimizer:  # type: ignore[misc]
        return optimizer.apply(sparsity_optimizer.algorithm)

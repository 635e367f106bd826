"""Sparsity as releases 2.0 and 2.1 configure it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from cstorch.optim.optimizer import Optimizer
from cstorch.sparse.configure import configure
from cstorch.sparse.group import Group


class SparsityOptimizer:
    """A sparsity algorithm for parameters that a configuration names.

    `hook_module(model)` makes them sparse, and `SparsityWrapperOptimizer(optimizer, this)` keeps them so.
    """

    def __init__(self, algorithm: Group) -> None:
        self.algorithm = algorithm

    def hook_module(self, module: nn.Module) -> None:
        """Makes the masks, and zeroes what they prune."""
        module.apply(self.algorithm)

    def initialize_sparsity(self) -> None:
        """Nothing: the masks are there from `hook_module` on."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the algorithm."""
        return self.algorithm.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.algorithm.load_state_dict(state_dict)


def configure_sparsity_optimizer(
    sparsity_type: str, named_parameters: Iterable[tuple[str, torch.Tensor]], **kwargs: Any
) -> SparsityOptimizer:
    """The algorithm of a name ("static", "gmp", "set" or "rigl") with its settings.

    Args:
        sparsity_type: the name, in any case.
        named_parameters: of the model.
        **kwargs: arguments of the algorithm; `param_name_patterns`: a regular expression, or several, one of which the
            name of a sparse parameter has. Without: all that `cstorch.sparse.configure` chooses.

    Raises:
        ValueError, TypeError: as cstorch.sparse.configure.
    """
    settings = {"algorithm": sparsity_type, **kwargs}
    patterns = settings.pop("param_name_patterns", None)
    if patterns is not None:
        expressions = [patterns] if isinstance(patterns, str) else list(patterns)
        chosen = {name for name, _ in named_parameters if any(re.search(each, name) for each in expressions)}
        settings["param_filter"] = lambda name, parameter: name in chosen
    return SparsityOptimizer(configure(settings))


class SparsityWrapperOptimizer:
    """`SparsityWrapperOptimizer(optimizer, sparsity)` is the optimizer itself, which keeps weights sparse from then on.

    optimizer: of cstorch.optim.
    sparsity_optimizer: whose `hook_module` was called with the model.
    """

    def __new__(cls, optimizer: Optimizer, sparsity_optimizer: SparsityOptimizer) -> Optimizer:  # type: ignore[misc]
        return optimizer.apply(sparsity_optimizer.algorithm)

"""Several sparsity algorithms, each for some of a model's parameters."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cstorch.sparse.base import Hook, SparseParameter, SparsityAlgorithm, dense_parameters
from cstorch.sparse.schedules import HyperParameterSchedule

# A pattern of names, as of files ("*.ffn.*"), or a function of name and parameter.
Filter: TypeAlias = str | Callable[[str, torch.Tensor], bool]


class Group(SparsityAlgorithm):
    """Sparsity algorithms by filter. A parameter gets the first algorithm whose filter chooses it.

    Args:
        groups: The algorithms by a pattern of parameters' names, such as "*.ffn.*"; None: none.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """

    def __init__(self, groups: Mapping[str, SparsityAlgorithm] | None = None) -> None:
        super().__init__(init_method="from_zeros")
        self._groups: list[tuple[Filter, SparsityAlgorithm]] = []
        for pattern, algorithm in (groups or {}).items():
            self.add(pattern, algorithm)

    def add(self, filter: Filter, algorithm: SparsityAlgorithm) -> None:
        """Adds an algorithm after the others.

        Args:
            filter: A pattern of names, or a function of name and parameter.
            algorithm: The algorithm.

        Raises:
            TypeError: It is a Group, or no algorithm.
        """
        if isinstance(algorithm, Group) or not isinstance(algorithm, SparsityAlgorithm):
            raise TypeError(f"a Group holds sparsity algorithms, not a {type(algorithm).__name__}; see Group.extend")
        self._groups.append((filter, algorithm))

    def extend(self, group: "Group") -> None:
        """Adds all algorithms of another group.

        Args:
            group: The other group.
        """
        self._groups += group._groups

    @property
    def algorithms(self) -> list[SparsityAlgorithm]:
        """The algorithms, each once, in order."""
        return list(dict.fromkeys(algorithm for _, algorithm in self._groups))

    @property
    def num_sparse_params(self) -> int:
        return sum(algorithm.num_sparse_params for algorithm in self.algorithms)

    @property
    def sparsity(self) -> Mapping[str, HyperParameterSchedule | None]:
        return {name: schedule for algorithm in self.algorithms for name, schedule in algorithm.sparsity.items()}

    def sparsify_module(self, module: nn.Module) -> None:
        """Makes the parameters sparse that a filter chooses, unless they have a mask.

        Args:
            module: The model.
        """
        for owner, name, parameter in dense_parameters(module):
            self.sparsify_parameter(owner, name, parameter)

    def sparsify_parameter(self, module: nn.Module, name: str, param: torch.Tensor) -> None:
        for filter, algorithm in self._groups:
            if fnmatchcase(name, filter) if isinstance(filter, str) else filter(name, param):
                algorithm.sparsify_parameter(module, name, param)
                return

    def sparsify_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer sparse for each algorithm that has a parameter in it.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: The optimizer has no sparse parameter, or an algorithm has another optimizer already.
        """
        concerned = [a for a in self.algorithms if any(True for _ in a.get_sparse_params(optimizer))]
        if not concerned:
            raise ValueError("the optimizer has no sparse parameter: call model.apply(sparsity) first")
        for algorithm in concerned:
            algorithm.sparsify_optimizer(optimizer)

    def get_sparse_params(self, obj: Any) -> Iterator[SparseParameter]:
        return (sparse for algorithm in self.algorithms for sparse in algorithm.get_sparse_params(obj))

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for algorithm in self.algorithms:
            algorithm.update(optimizer)

    def register_target_sparsity_hook(self, hook: Hook) -> RemovableHandle:
        return _JointHandle([algorithm.register_target_sparsity_hook(hook) for algorithm in self.algorithms])

    def register_computed_sparsity_hook(self, hook: Hook) -> RemovableHandle:
        return _JointHandle([algorithm.register_computed_sparsity_hook(hook) for algorithm in self.algorithms])

    def visit_state(self, f: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        for algorithm in self.algorithms:
            algorithm.visit_state(f)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): algorithm.state_dict() for number, algorithm in enumerate(self.algorithms)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for number, algorithm in enumerate(self.algorithms):
            algorithm.load_state_dict(state_dict[str(number)])


class _JointHandle(RemovableHandle):
    """Removes the hooks of all algorithms."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        super().__init__(OrderedDict())
        self._handles = handles

    def remove(self) -> None:
        with ExitStack() as stack:
            for handle in self._handles:
                stack.callback(handle.remove)

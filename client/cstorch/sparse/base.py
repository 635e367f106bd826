"""The base class of sparsity algorithms: it finds parameters, keeps their masks, and holds pruned elements at zero."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cstorch.core.compile import CompiledModel
from cstorch.optim.optimizer import Optimizer
from cstorch.sparse.masks import WHOLE, ScoreShaper, init_method
from cstorch.sparse.schedules import Constant, HyperParameterSchedule, ScheduleLike, make_schedule

# Returns the first mask, from the weight, the sparsity (float32, rank 0), the groups to balance and the device.
InitMethod: TypeAlias = Callable[[Any, torch.Tensor, ScoreShaper | None, torch.device | None], torch.Tensor]
# Called with the algorithm, the parameter's name and a sparsity.
Hook: TypeAlias = Callable[[Any, str, torch.Tensor], None]

_NOT_SPARSE = ("embedding", "norm", "lm_head", "pe_helper")


def default_sparse_param_filter(name: str, param: torch.Tensor) -> bool:
    """Whether a parameter becomes sparse by default: it has at least two dimensions, and is no embedding or norm.

    Args:
        name: The path of the parameter in the model.
        param: The parameter.
    """
    return param.dim() > 1 and not any(word in name.lower() for word in _NOT_SPARSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseParameter:
    """A parameter with a mask.

    Args:
        module: The module that owns the parameter.
        name: The path of the parameter in the model that was made sparse.
    """

    module: nn.Module
    name: str

    @property
    def param(self) -> torch.Tensor:
        """The parameter, dense: zero where it is pruned."""
        return self.module.get_parameter(self._own_name)

    @property
    def mask(self) -> torch.Tensor:
        """Which elements are kept: bool, a persistent buffer of the module, `<parameter>_mask`."""
        return self.module.get_buffer(f"{self._own_name}_mask")

    @property
    def _own_name(self) -> str:
        return self.name.rpartition(".")[2]

    def prune(self, tensor: torch.Tensor) -> None:
        """Sets the pruned elements of a tensor to zero.

        Args:
            tensor: A tensor of the parameter's shape.
        """
        tensor.copy_(torch.where(self.mask, tensor, 0.0))


class SparsityAlgorithm:
    """The base class of sparsity algorithms, which keep some parameters of a model sparse.

    `model.apply(algorithm)` makes the masks and zeroes what they prune; then comes `optimizer.apply(algorithm)`. From
    then on each update is followed by `update`, gradients are masked before it, and pruned elements of the weights and
    of the optimizer's `state_names_to_sparsify` are exactly zero after it. The forward pass reads the zeroed weights.

    Args:
        sparsity: The fraction of elements that are zero, from 0 to less than 1, or a schedule; None with
            init_method="from_zeros".
        init_method: The first mask: "random", "topk" (largest magnitudes stay), "from_zeros" (what is zero is pruned),
            "checkerboard", or a function that returns the mask.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """

    def __init__(self, sparsity: ScheduleLike | None = None, init_method: str | InitMethod = "random") -> None:
        self._schedule = None if sparsity is None else make_schedule(sparsity)
        if isinstance(self._schedule, Constant) and not 0 <= self._schedule.value < 1:
            raise ValueError(f"sparsity must be at least 0 and less than 1, got {self._schedule.value}")
        if sparsity is None and init_method in ("random", "topk", "checkerboard"):
            raise ValueError(f"init_method={init_method!r} needs a sparsity")
        self._first_mask = _init_function(init_method)
        self._sparse_params: list[SparseParameter] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._target_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._computed_hooks: OrderedDict[int, Hook] = OrderedDict()

    @property
    def num_sparse_params(self) -> int:
        """The number of sparse parameters."""
        return len(self._sparse_params)

    @property
    def sparsity(self) -> Mapping[str, HyperParameterSchedule | None]:
        """The schedule of every sparse parameter, by its name."""
        return {sparse.name: self._schedule for sparse in self._sparse_params}

    def __call__(self, obj: Any) -> None:
        """Makes the argument of `model.apply` or `optimizer.apply` sparse."""
        # Module.apply calls this for each submodule first, but names are paths in the outermost module.
        if not isinstance(obj, nn.Module) or outermost_applied(self, obj) is obj:
            self.apply(obj)

    def apply(self, obj: Any) -> None:
        """Makes a model or an optimizer sparse.

        Args:
            obj: The model or the optimizer.

        Raises:
            TypeError: It is neither.
        """
        if isinstance(obj, CompiledModel):
            obj = obj.module
        if isinstance(obj, nn.Module):
            self.sparsify_module(obj)
        elif isinstance(obj, torch.optim.Optimizer):
            self.sparsify_optimizer(obj)
        else:
            raise TypeError(f"sparsity is applied to a module or an optimizer, not to {type(obj).__name__}")

    def sparsify_module(self, module: nn.Module) -> None:
        """Makes parameters of a model sparse, unless they have a mask.

        Args:
            module: The model.
        """
        for owner, name, parameter in dense_parameters(module):
            if default_sparse_param_filter(name, parameter):
                self.sparsify_parameter(owner, name, parameter)

    def sparsify_parameter(self, module: nn.Module, name: str, param: torch.Tensor) -> None:
        """Makes one parameter sparse.

        Args:
            module: The module that owns the parameter.
            name: The path of the parameter in the model.
            param: The parameter.

        Raises:
            ValueError: The mask of `init_method` is none of this parameter.
        """
        shaper = self._shaper()
        shaper.check(name, param)
        sparse = SparseParameter(module=module, name=name)
        with torch.no_grad():
            mask = self._first_mask(param.detach(), self._first_sparsity(param), shaper, param.device)
            if mask.shape != param.shape or mask.dtype is not torch.bool:
                raise ValueError(f"init_method made {mask.dtype}{list(mask.shape)} for {name}, not a bool mask of it")
            # State is a tensor of its own, not a view.
            whole = mask.clone(memory_format=torch.contiguous_format)
            module.register_buffer(f"{name.rpartition('.')[2]}_mask", whole)
            sparse.prune(param)
        self._sparse_params.append(sparse)
        module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda owner, _: self.prune_weight(
                SparseParameter(module=owner, name=name)
            )  # owner: a copy has the hook too
        )

    def _shaper(self) -> ScoreShaper:
        """Returns the groups of a weight that are balanced."""
        return WHOLE

    def _first_sparsity(self, param: torch.Tensor) -> torch.Tensor:
        step = torch.zeros((), dtype=torch.int64, device=param.device)
        return step.float() if self._schedule is None else self._schedule(step, step != 0)

    def prune_weight(self, sparse_param: SparseParameter) -> None:
        """Sets the pruned elements of a parameter to zero.

        Args:
            sparse_param: The parameter.
        """
        with torch.no_grad():
            sparse_param.prune(sparse_param.param)

    def sparsify_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer mask gradients before each step, and update and apply the masks after it.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: The optimizer has no sparse parameter, or the algorithm has another optimizer already.
        """
        if self._optimizer is not None:
            raise ValueError("a sparsity algorithm goes with one optimizer: make another algorithm for another one")
        if not any(True for _ in self.get_sparse_params(optimizer)):
            raise ValueError("the optimizer has no sparse parameter: call model.apply(sparsity) first")
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._mask_gradients(optimizer))
        optimizer.register_step_post_hook(lambda *_: self.update(optimizer))

    def get_sparse_params(self, obj: Any) -> Iterator[SparseParameter]:
        """Returns the sparse parameters of a module or an optimizer, or the one that a tensor is.

        Args:
            obj: The module, the optimizer or the tensor.
        """
        if isinstance(obj, torch.Tensor):
            wanted = {id(obj)}
        elif isinstance(obj, torch.optim.Optimizer):
            wanted = {id(parameter) for group in obj.param_groups for parameter in group["params"]}
        else:
            wanted = {id(parameter) for parameter in obj.parameters()}
        return (sparse for sparse in self._sparse_params if id(sparse.param) in wanted)

    def _mask_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for sparse in self.get_sparse_params(optimizer):
            if sparse.param.grad is not None:
                sparse.param.grad = torch.where(sparse.mask, sparse.param.grad, 0.0)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Applies the masks to the weights and to the optimizer's state: called after each step of the optimizer.

        Args:
            optimizer: The optimizer; None: the one that was made sparse.

        Raises:
            ValueError: There is none.
        """
        optimizer = optimizer or self._optimizer
        if optimizer is None:
            raise ValueError("call optimizer.apply(sparsity) before update()")
        names = optimizer.state_names_to_sparsify() if isinstance(optimizer, Optimizer) else []
        with torch.no_grad():
            for sparse in self.get_sparse_params(optimizer):
                sparse.prune(sparse.param)
                for name in names:
                    if name in optimizer.state[sparse.param]:
                        sparse.prune(optimizer.state[sparse.param][name])
                for hook in self._computed_hooks.values():
                    hook(self, sparse.name, 1 - sparse.mask.float().mean())

    def register_target_sparsity_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function that is called in each step with the sparsity that a parameter is to have.

        Args:
            hook: Called with the algorithm, the parameter's name, and the sparsity, which is a tensor of the step:
                return it from the step, or read it in a step closure.

        Returns:
            A handle whose `remove` removes the hook.
        """
        return _add_hook(self._target_hooks, hook)

    def register_computed_sparsity_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function that is called in each step with the fraction that the mask of a parameter prunes.

        Args:
            hook: Called with the algorithm, the parameter's name, and the fraction, which is a tensor of the step.

        Returns:
            A handle whose `remove` removes the hook.
        """
        return _add_hook(self._computed_hooks, hook)

    def visit_state(self, f: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Calls a function with each state tensor besides the masks.

        Args:
            f: The function. What it returns takes the place of the tensor, unless it is None.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state besides the masks, which are part of the model's state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state besides the masks.

        Args:
            state_dict: What `state_dict` returned.
        """


def dense_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Owner, path and value of the parameters that have no mask; one that several modules share comes once."""
    for name, parameter in list(module.named_parameters()):
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        if f"{own}_mask" not in owner._buffers:
            yield owner, name, parameter


def _init_function(method: str | InitMethod) -> InitMethod:
    if not isinstance(method, str):
        return method
    function = init_method(method)
    return lambda weight, sparsity, shaper, device: function(weight, sparsity, shaper or WHOLE)


def outermost_applied(function: Callable[[nn.Module], None], module: nn.Module) -> nn.Module:
    """Returns the module whose `apply` was called with the function; the module itself if it was called by hand."""
    outermost, frame = module, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is nn.Module.apply.__code__ and frame.f_locals["fn"] is function:
            outermost = frame.f_locals["self"]
    return outermost


def _add_hook(hooks: "OrderedDict[int, Hook]", hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

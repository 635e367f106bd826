"""The registry of stateful objects, and the names of the states in them.

Models, optimizers, schedulers, grad scalers and metrics register themselves when they are made, sparsity algorithms
when they are applied. The names are those of the real system: `state.model.fc1.weight`,
`state.optimizer.state.0.exp_avg`, `state.schedulers.0.last_epoch`, `state.grad_scaler.0.scale`,
`state.metrics.accuracy.0.total`.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

Kind = Literal["model", "optimizer", "scheduler", "grad_scaler", "sparsity", "metric"]
Getter = Callable[[], torch.Tensor]


class Registry:
    """The stateful objects of this process, by kind, in the order of their creation. It keeps none alive."""

    def __init__(self) -> None:
        # A number is not used again: the cluster may still have states of a deleted object under its name.
        self._objects = _no_objects()
        self._made: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)

    def clear(self) -> None:
        """Removes all objects; numbers begin with 0 again."""
        self._objects = _no_objects()
        self._made = dict.fromkeys(get_args(Kind), 0)

    def register(self, kind: Kind, stateful: Any) -> int:
        """Adds an object and returns its number among those of its kind; the same object keeps its number."""
        for number, known in self.of_kind(kind):
            if known is stateful:
                return number
        number = self._made[kind]
        self._made[kind] += 1
        self._objects[kind][number] = stateful
        return number

    def of_kind(self, kind: Kind) -> Iterator[tuple[int, Any]]:
        """Yields the live objects of a kind with their numbers."""
        yield from list(self._objects[kind].items())


def _no_objects() -> "dict[Kind, weakref.WeakValueDictionary[int, Any]]":
    # Garbage is collected at any time: this dictionary keeps the entries of dead objects while it is iterated.
    return {kind: weakref.WeakValueDictionary() for kind in get_args(Kind)}


_registry = Registry()


def register(kind: Kind, stateful: Any) -> int:
    """Makes the tensors of an object states of every step that is traced from now on.

    Returns:
        The number of the object among those of its kind.
    """
    return _registry.register(kind, stateful)


def clear() -> None:
    """Removes all objects, when the backend closes: their names had a meaning on its cluster only."""
    _registry.clear()


def registered(kind: Kind) -> list[Any]:
    """Returns the live objects of a kind, in the order of their creation."""
    return [stateful for _, stateful in _registry.of_kind(kind)]


def named_getters(registry: Registry | None = None) -> dict[str, Getter]:
    """Returns the getter of each state, by name; it returns the tensor that is the state at the time of the call.

    An optimizer of a model elsewhere, such as one that the script trains on the CPU meanwhile, has no states, nor have
    its schedulers.
    """
    registry = registry or _registry
    getters: dict[str, Getter] = {}
    devices: set[torch.device] = set()
    for number, model in registry.of_kind("model"):
        getters.update(_of_module(f"state.{_numbered('model', number)}", model))
        devices.update(parameter.device for parameter in model.parameters())
    for number, optimizer in registry.of_kind("optimizer"):
        if _is_of_models_on(devices, optimizer):
            getters.update(_of_optimizer(f"state.{_numbered('optimizer', number)}.state", optimizer))
    for number, scheduler in registry.of_kind("scheduler"):
        if _is_of_models_on(devices, scheduler.optimizer):
            getters.update(_of_attributes(f"state.schedulers.{number}", scheduler))
    for number, scaler in registry.of_kind("grad_scaler"):
        getters.update(_of_attributes(f"state.grad_scaler.{number}", scaler))
    for number, algorithm in registry.of_kind("sparsity"):
        getters.update(_of_attributes(f"state.sparsity.{number}", algorithm))
    for number, metric in registry.of_kind("metric"):
        getters.update(_of_module(f"state.metrics.{metric.name}.{number}", metric))
    return getters


def _is_of_models_on(devices: Collection[torch.device], optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a parameter on one of these devices; of no devices, every optimizer has."""
    return not devices or any(p.device in devices for group in optimizer.param_groups for p in group["params"])


def module_paths() -> dict[nn.Module, str]:
    """Returns the path of every module in a compiled model, for the names of layers."""
    paths: dict[nn.Module, str] = {}
    for number, model in _registry.of_kind("model"):
        for path, module in model.named_modules():
            name = path if number == 0 else f"{_numbered('model', number)}.{path}".rstrip(".")
            paths.setdefault(module, name)
    return paths


def _numbered(word: str, number: int) -> str:
    return word if number == 0 else f"{word}_{number}"


def _of_module(prefix: str, root: nn.Module) -> Iterator[tuple[str, Getter]]:
    for path, module in root.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield f"{prefix}.{path}.{name}" if path else f"{prefix}.{name}", _item(tensors, name)


def _of_optimizer(prefix: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Getter]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{index}.{name}", _item(state, name)


def _of_attributes(prefix: str, stateful: Any) -> Iterator[tuple[str, Getter]]:
    attributes = vars(stateful)
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}.{name.lstrip('_')}", _item(attributes, name)


def _item(mapping: Mapping[str, Any], key: str) -> Getter:
    return lambda: mapping[key]

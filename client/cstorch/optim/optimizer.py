"""The base classes of every optimizer: Optimizer, and UpdateRule for one with an update per parameter."""

import copy
import inspect
import math
from abc import ABCMeta, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from cstorch._internal import state
from cstorch._internal.tracing.context import is_tracing

ParamsT: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
Number: TypeAlias = float | torch.Tensor  # a setting of a parameter group: schedules make it a tensor

# torch wraps these to keep its compiler out, and imports the compiler for it at the first call: more than a second.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

_BETA_POWERS = ("beta1_power", "beta2_power")  # states of optimizers that do not count their updates, but use betas^t


class Schedule(Protocol):
    """A schedule of settings, as the optimizer calls it."""

    def write_to_groups(self) -> None:
        """Writes the values for the current epoch into the groups, as tensors of the step."""

    def settle(self) -> None:
        """Writes numbers into the groups, if they have tensors of a step that are not known any more."""


class _Preinitialized(ABCMeta):
    """Makes an optimizer's state when its whole constructor is done, so that preinitialize sees every attribute."""

    if not TYPE_CHECKING:  # pyright would no longer look at the parameters of the constructor

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if inspect.isabstract(cls):
                missing = ", ".join(sorted(cls.__abstractmethods__))
                raise TypeError(
                    f"{cls.__name__} does not define {missing}. An optimizer makes all its state in "
                    '`preinitialize(self)`, such as self.state[p]["mean"] = cstorch.zeros_like(p) for each p of its '
                    "groups, since a traced step only changes states that are there before it; in "
                    "`step(self, closure=None)` it updates its parameters"
                )
            optimizer = super().__call__(*args, **kwargs)
            optimizer._preinitialize()
            state.register("optimizer", optimizer)
            return optimizer

    @property
    def __signature__(cls) -> inspect.Signature:
        # Python would show that of __call__.
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])


class Optimizer(torch.optim.Optimizer, metaclass=_Preinitialized):
    """The base class of optimizers whose step can be traced.

    A subclass makes all its state in `preinitialize` and only updates it, in place, in `step`. The step is traced once,
    so `step` must not branch on the value of a tensor. `group["lr"]` may be a rank 0 tensor, which a schedule computes:
    write `p.sub_(lr * update)`, not `p.add_(update, alpha=-lr)`. Used by one thread.

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        defaults: The settings of groups that do not have them.
        enable_global_step: Whether each parameter has a count of its updates (float32) in its state "step".

    Example:
        ::

            class Signs(cstorch.optim.Optimizer):
                def __init__(self, params, lr):
                    super().__init__(params, {"lr": lr})

                def preinitialize(self):
                    for p in self.parameters():
                        self.state[p]["mean"] = cstorch.zeros_like(p)

                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            mean = self.state[p]["mean"].mul_(0.9).add_(p.grad)
                            p.sub_(group["lr"] * torch.sign(mean))

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], enable_global_step: bool = False) -> None:
        self.enable_global_step = enable_global_step
        self._preinitialized = False
        self._betas_of_powers: list[tuple[float, ...]] = []  # by group: the betas whose powers are in the state
        super().__init__(params, defaults)
        self._make_hooks()

    def _make_hooks(self) -> None:
        self.schedulers: list[Schedule] = []
        self._zero_grad_pre_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._zero_grad_post_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.register_step_pre_hook(_evaluate_schedules)

    def __getstate__(self) -> dict[str, Any]:
        # Without hooks, as torch. Schedules that are copied too add themselves to the copy.
        return {
            **super().__getstate__(),
            "enable_global_step": self.enable_global_step,
            "_preinitialized": self._preinitialized,
            "_betas_of_powers": self._betas_of_powers,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "schedulers" not in vars(self):  # a copy; a load of a state dict comes here too, and keeps the hooks
            self._make_hooks()

    @abstractmethod
    def preinitialize(self) -> None:
        """Makes every state tensor: `self.state[p]["name"] = cstorch.zeros_like(p)`. Called once by the constructor."""

    def remake_state(self) -> None:
        """Makes the state tensors anew if a script has dropped them all, as in `optimizer.state.clear()`."""
        if self._preinitialized and not self.state:
            self.preinitialize()
            self._betas_of_powers = self._betas()

    def _betas(self) -> list[tuple[float, ...]]:
        """Returns the betas of each group that are numbers; a tensor may have another value in each step."""
        return [
            tuple(beta for beta in group.get("betas", ()) if not isinstance(beta, torch.Tensor))
            for group in self.param_groups
        ]

    def fit_beta_powers(self) -> None:
        """Makes the powers of betas in the state those of betas that a script has changed, of as many updates."""
        betas = self._betas()
        for group, before, after in zip(self.param_groups, self._betas_of_powers, betas, strict=False):
            if after != before:
                for parameter in group["params"]:
                    _fit_powers(self.state[parameter], before, after)
        self._betas_of_powers = betas

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters from their gradients.

        Args:
            closure: A function that computes the loss anew and returns it; None: none.

        Returns:
            What the closure returned; None without one.
        """

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the state tensors that take the sparsity mask of their parameter."""
        return []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters and makes their state; the state of the others stays as it is.

        Args:
            param_group: A dictionary with "params" and the settings that differ from the defaults.
        """
        _add_param_group(self, param_group)
        if self._preinitialized:
            self._preinitialize()

    def _preinitialize(self) -> None:
        kept = {parameter: dict(values) for parameter, values in self.state.items()}
        with torch.no_grad():
            self.preinitialize()
            if self.enable_global_step:
                for parameter in self.parameters():
                    self.state[parameter]["step"] = scalar_state(parameter, 0.0)
        for parameter, values in kept.items():
            self.state[parameter].update(values)
        self._betas_of_powers += self._betas()[len(self._betas_of_powers) :]
        self._preinitialized = True

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of all groups, in the order of their numbers in the state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def increment_global_step(self, p: torch.Tensor) -> torch.Tensor:
        """Adds one to the count of a parameter's updates.

        Args:
            p: The parameter.

        Returns:
            The count (float32, rank 0).

        Raises:
            RuntimeError: The optimizer was made without `enable_global_step`.
        """
        if not self.enable_global_step:
            raise RuntimeError(
                f"{type(self).__name__} keeps no global step: pass enable_global_step=True to Optimizer.__init__"
            )
        step: torch.Tensor = self.state[p]["step"]
        return step.add_(1.0)

    def apply(self, f: Callable[["Optimizer"], Any]) -> "Optimizer":
        """Calls a function with this optimizer, as `torch.nn.Module.apply` does with a module.

        Args:
            f: The function, or a sparsity algorithm of `cstorch.sparse`.

        Returns:
            This optimizer.
        """
        f(self)
        return self

    def visit_state(self, fn: Callable[[Any], Any]) -> None:
        """Calls a function with each value of the state.

        Args:
            fn: The function. What it returns takes the place of the value, unless it is None.
        """
        with torch.no_grad():
            for values in self.state.values():
                for name, value in values.items():
                    new = fn(value)
                    if new is not None:
                        values[name] = new

    def state_dict(self) -> dict[str, Any]:
        """Returns, as torch, the settings of the groups, and the state by the number of the parameter."""
        for scheduler in self.schedulers:
            scheduler.settle()
        return _state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads settings and state. State tensors stay the same tensors and take the values.

        A state tensor that the state dict does not have keeps its value, and so does a setting, if its default is a
        switch, zero or None, such as `correct_bias`, which groups of torch's AdamW do not have. Settings that this
        optimizer does not know are added to its groups, as by torch. Load hooks run before and after all of this.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: Groups, names or shapes do not fit; nothing is changed.
        """
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, loaded)
            loaded = loaded if changed is None else changed
        groups = self._fitting_groups(loaded["param_groups"])
        values = self._fitting_values(loaded["state"])
        self.__setstate__({"state": self.state, "param_groups": groups})
        with torch.no_grad():
            for current, value in values:
                current.copy_(value)
        if values:
            self._betas_of_powers = self._betas()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _fitting_groups(self, loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns new groups with loaded settings. Raises ValueError if they are of another optimizer."""
        sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (loaded, self.param_groups))
        if sizes != own_sizes:
            raise ValueError(
                f"the groups of the loaded state dict have {sizes} parameters, those of this optimizer {own_sizes}; "
                "make it with the groups that were saved"
            )
        # torch fills these alone too: settings that came with a later release, with the value that switches them off.
        required = [
            name
            for name, value in self.defaults.items()
            if not (isinstance(value, bool) or value is None or is_zero(value))
        ]
        for number, group in enumerate(loaded):
            if missing := [name for name in required if name not in group]:
                raise ValueError(
                    f"group {number} of the loaded state dict has no {', '.join(map(repr, missing))}, which "
                    f"{type(self).__name__} needs; was it saved from another optimizer? If not, add the value: "
                    f'state_dict["param_groups"][{number}][{missing[0]!r}] = ...'
                )
        return [
            {**own, **copy.deepcopy(group), "params": own["params"]}
            for own, group in zip(self.param_groups, loaded, strict=True)
        ]

    def _fitting_values(self, loaded: Mapping[Any, Mapping[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs of a state tensor and its loaded value. Raises ValueError if names or shapes do not fit."""
        parameters = self.parameters()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, values in loaded.items():
            number = int(key)
            if not 0 <= number < len(parameters):
                raise ValueError(
                    f"the loaded state dict has state of parameter {number}, "
                    f"but this optimizer has {len(parameters)} parameters"
                )
            own = self.state.get(parameters[number], {})
            for name, value in values.items():
                current = own.get(name)
                if not isinstance(current, torch.Tensor):
                    known = ", ".join(own) or "none"
                    raise ValueError(
                        f"the loaded state dict has {name!r} for parameter {number}, which {type(self).__name__} "
                        f"does not keep (it keeps: {known}); {self._way_out(name, own)}"
                    )
                value = torch.as_tensor(value)
                if value.shape != current.shape:
                    raise ValueError(
                        f"the loaded state {name!r} of parameter {number} has shape {tuple(value.shape)}, "
                        f"here it has {tuple(current.shape)}"
                    )
                pairs.append((current, value))
        return pairs

    def _way_out(self, name: str, own: Iterable[str]) -> str:
        """Returns what to do about a loaded state tensor that this optimizer does not keep."""
        if name != "step":
            return "was it saved from another optimizer or other settings?"
        powers = [f"{power} = betas[{i}] ** (step + 1)" for i, power in enumerate(_BETA_POWERS) if power in own]
        change = f"replace it by {' and '.join(powers)}" if powers else "remove it"
        return f"torch's {type(self).__name__} counts updates in it: {change}, in the state of each parameter"

    def register_zero_grad_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a function that is called before each `zero_grad`.

        Args:
            hook: Called as `hook(optimizer, args, kwargs)`.

        Returns:
            A handle whose `remove` removes the hook.
        """
        return _add_hook(self._zero_grad_pre_hooks, hook)

    def register_zero_grad_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a function that is called after each `zero_grad`.

        Args:
            hook: Called as `hook(optimizer, args, kwargs)`.

        Returns:
            A handle whose `remove` removes the hook.
        """
        return _add_hook(self._zero_grad_post_hooks, hook)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drops the gradients, as torch.

        Args:
            *args: Those of torch's `zero_grad`.
            **kwargs: Those of torch's `zero_grad`: `set_to_none=False` sets the gradients to zero instead.
        """
        for hook in self._zero_grad_pre_hooks.values():
            hook(self, args, kwargs)
        _zero_grad(self, *args, **kwargs)
        for hook in self._zero_grad_post_hooks.values():
            hook(self, args, kwargs)


def _evaluate_schedules(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A traced step computes the settings from its own epoch counters, not from values of an earlier time.
    assert isinstance(optimizer, Optimizer)
    for scheduler in optimizer.schedulers:
        scheduler.write_to_groups()
    if not is_tracing():
        optimizer.fit_beta_powers()
    elif optimizer._betas() != optimizer._betas_of_powers and any("beta1_power" in s for s in optimizer.state.values()):
        raise RuntimeError(
            "the betas of an optimizer were changed in the loop of an executor, whose steps are those of the first "
            "trace: change them before the loop"
        )


def _fit_powers(state: dict[str, Any], before: Sequence[float], after: Sequence[float]) -> None:
    powers = [(state[name], *betas) for name, *betas in zip(_BETA_POWERS, before, after, strict=False) if name in state]
    # The power of the greatest beta tells the number of updates longest; then all of them are as good as zero.
    known = max(((old, float(power)) for power, old, _ in powers if old > 0 and power > 0), default=None)
    for power, old, new in powers:
        if new != old:
            with torch.no_grad():
                power.fill_(0.0 if known is None else new ** round(math.log(known[1]) / math.log(known[0])))


def _add_hook(hooks: "OrderedDict[int, Callable[..., None]]", hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def scalar_state(parameter: torch.Tensor, value: float) -> torch.Tensor:
    """Returns a state tensor (float32, rank 0) on the parameter's device."""
    return torch.full((), value, dtype=torch.float32, device=parameter.device)


def is_zero(setting: Number) -> bool:
    """Whether a setting is zero before the step runs; one that a schedule computes never is."""
    return not isinstance(setting, torch.Tensor) and setting == 0


def check_not_negative(**settings: Number) -> None:
    """Raises ValueError for the first setting that is a negative number."""
    for name, value in settings.items():
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ValueError(f"Invalid {name}: {value}. It must not be negative")


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ValueError unless both betas are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta at index {index}: {beta}. It must be at least 0 and less than 1")


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a parameter, or None. Raises RuntimeError if it is sparse."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        raise RuntimeError("sparse gradients are not supported: make the embedding with sparse=False")
    return gradient


# --- The step of most optimizers: one update rule for every parameter -------------------------------------------------


class UpdateRule(Optimizer):
    """The base class of optimizers that update each parameter by itself, if it has a gradient."""

    @abstractmethod
    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates one parameter and its state, in place.

        Args:
            group: The settings of the parameter's group.
            parameter: The parameter.
            gradient: Its gradient, dense, of its shape.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: A function that computes the loss anew and returns it; None: none.

        Returns:
            What the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = dense_gradient(parameter)
                if gradient is not None:
                    self.update(group, parameter, gradient)
        return loss

    def make_zeros(self, *names: str) -> None:
        """Makes state tensors of zeros for every parameter, of its shape and type.

        Args:
            *names: The names of the tensors.
        """
        for parameter in self.parameters():
            for name in names:
                self.state[parameter][name] = torch.zeros_like(parameter)


def regularised(group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns `g + weight_decay * p`, with g negated first if the group is to be maximized."""
    if group.get("maximize", False):
        gradient = -gradient
    return gradient if is_zero(group["weight_decay"]) else gradient + group["weight_decay"] * parameter

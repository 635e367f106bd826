"""GradScaler and optimizer_step: from the loss, scaled or not, to the updated weights."""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final, Literal

import torch

from cstorch._internal import state
from cstorch._internal.check.run import checked_run
from cstorch.amp.updates import (
    ConditionalUpdate,
    StepNotes,
    clip_norm,
    gradients,
    step_notes,
    total_norm,
    unscaled_norm,
)
from cstorch.backend import current_backend, has_backend
from cstorch.backends.mixed_precision import get_half_dtype_str
from cstorch.core.tensors import full
from cstorch.errors import ConfigurationError, UsageError

# --- GradScaler: scales the loss, so that small gradients do not vanish in half precision -----------------------------


# The first dynamic scale and the default of the greatest one. bfloat16 needs none: it has the exponents of float32.
_LARGEST: Final = {"float16": 2.0**15, "bfloat16": 1.0, "cbfloat16": 2.0**31}
_STATES: Final = ("loss_scale", "steps_since_rescale", "overflows_since_rescale", "num_skipped_steps")


class GradScaler:
    """Scales the loss before the backward pass, and the gradients back before the update. Used in a traced step.

    A dynamic scale is state of the step. A step whose gradients are not all finite changes neither parameters nor
    optimizer state, nor the states that hooks of the optimizer's step change, such as the masks of sparse training:
    torch would not call the optimizer. The Python code of hooks runs when the step is traced. If more than
    `overflow_tolerance` of the steps since the last change of the scale overflowed, the scale is halved; otherwise it
    is doubled `steps_per_increase` steps after its last change. A static scale never changes, and skips no step. On the
    CPU backend nothing is scaled, and there is no state.

    Args:
        loss_scale: "dynamic", or the static scale; None and 0 are 1.
        init_scale: The first dynamic scale; None: 2^15 for float16, 2^31 for cbfloat16, 1 for bfloat16.
        steps_per_increase: The number of steps without overflow after which the scale is doubled; None: 2000.
        min_loss_scale: The least dynamic scale; None: 2^-14.
        max_loss_scale: The greatest dynamic scale; None: `init_scale`, or its default if that is greater.
        overflow_tolerance: The fraction of steps with overflow, from 0 to less than 1, that does not yet halve the
            scale.
        max_gradient_norm: The greatest norm over all gradients of an optimizer, to which `step` clips them; None: no
            clipping.

    Raises:
        ConfigurationError: A setting is out of range.
        UsageError: Raised by the methods of a dynamic scaler that was made before the backend of a cluster.

    Example:
        ::

            scaler = cstorch.amp.GradScaler(loss_scale="dynamic")

            @cstorch.trace
            def training_step(batch):
                loss = model(batch)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                return loss

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"] | None = None,
        init_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.0,
        max_gradient_norm: float | None = None,
    ) -> None:
        self._is_dynamic = loss_scale == "dynamic"
        if isinstance(loss_scale, str) and not self._is_dynamic:
            raise ConfigurationError(f"loss_scale is a number or 'dynamic', not {loss_scale!r}")
        self._static_scale = float(loss_scale) if loss_scale and not isinstance(loss_scale, str) else 1.0
        half = get_half_dtype_str()
        self._initial = _first_scale(_LARGEST[half] if init_scale is None else init_scale)
        self._steps_per_increase = 2000 if steps_per_increase is None else steps_per_increase
        self._smallest = 2.0**-14 if min_loss_scale is None else min_loss_scale
        self._largest = max(_LARGEST[half], self._initial) if max_loss_scale is None else max_loss_scale
        self._overflow_tolerance = overflow_tolerance
        self._max_gradient_norm = max_gradient_norm
        self._check()
        self._has_tensors = self._is_csx and self._is_dynamic
        if self._has_tensors:
            self._loss_scale = full((), self._initial, torch.float32)
            self._steps_since_rescale = full((), 0, torch.int64)
            self._overflows_since_rescale = full((), 0, torch.int64)
            self._num_skipped_steps = full((), 0, torch.int64)
            state.register("grad_scaler", self)

    def _check(self) -> None:
        scales = {
            "loss_scale": self._static_scale,
            "init_scale": self._initial,
            "min_loss_scale": self._smallest,
            "max_loss_scale": self._largest,
        }
        for name, scale in scales.items():
            if not 0 < scale < math.inf:
                raise ConfigurationError(f"{name} must be a positive number, not {scale}")
        if self._smallest > self._largest:
            raise ConfigurationError(f"min_loss_scale, {self._smallest}, is above max_loss_scale, {self._largest}")
        if self._steps_per_increase < 1:
            raise ConfigurationError(f"steps_per_increase must be at least 1, not {self._steps_per_increase}")
        if not 0 <= self._overflow_tolerance < 1:
            raise ConfigurationError(
                f"overflow_tolerance must be at least 0 and less than 1, not {self._overflow_tolerance}"
            )
        if self._max_gradient_norm is not None and self._max_gradient_norm < 0:
            raise ConfigurationError(f"max_gradient_norm must not be negative, not {self._max_gradient_norm}")

    @property
    def _is_csx(self) -> bool:
        return has_backend() and current_backend().is_csx

    @property
    def _has_state(self) -> bool:
        if not (self._is_csx and self._is_dynamic):
            return False
        if not self._has_tensors:
            raise UsageError(
                "this GradScaler was made before the backend, so it has no state there: make it afterwards"
            )
        return True

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the state of a dynamic scale by name; nothing on the CPU backend or for a static scale.

        Args:
            destination: A dictionary that takes the state and is returned; None: a new one.
        """
        destination = {} if destination is None else destination
        if self._has_state:
            destination.update({name: getattr(self, f"_{name}") for name in _STATES})
        return destination

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a dynamic scale. A scaler without state ignores it; an empty state changes nothing.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: Part of the state is missing.
        """
        if not self._has_state or not state_dict:
            return
        missing = [name for name in _STATES if name not in state_dict]
        if missing:
            raise ValueError(f"the loaded state of the GradScaler lacks {', '.join(missing)}")
        with torch.no_grad():
            for name in _STATES:
                getattr(self, f"_{name}").copy_(torch.as_tensor(state_dict[name]))

    def get_non_clamped_scale(self) -> torch.Tensor | float:
        """Returns the scale as it was set or loaded, even out of its bounds."""
        if self._has_state:
            return self._loss_scale
        return self._static_scale if self._is_csx else 1.0

    def get_scale(self) -> torch.Tensor | float:
        """Returns the scale: a float32 tensor of rank 0 if dynamic; 1 on the CPU backend."""
        scale = self.get_non_clamped_scale()
        return scale.clamp(self._smallest, self._largest) if isinstance(scale, torch.Tensor) else scale

    def get_num_skipped_steps(self) -> torch.Tensor | int:
        """Returns the number of skipped steps: an int64 tensor of rank 0 if the scale is dynamic, else 0."""
        return self._num_skipped_steps if self._has_state else 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the scaled loss; the loss itself on the CPU backend.

        Args:
            loss: The loss of the step.
        """
        return loss * self.get_scale() if self._is_csx else loss

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Scales the gradients of an optimizer back, in place, so that they can be read or clipped before `step`.

        Args:
            optimizer: The optimizer. Its gradients are those of the scaled loss.

        Raises:
            UsageError: The gradients were unscaled in this step already, or no step is being traced.
        """
        if not self._is_csx:
            return
        notes = step_notes()
        if optimizer in notes.norms:
            raise UsageError("the gradients of this optimizer were unscaled in this step already: call unscale_ once")
        self._unscale(optimizer, notes)

    def _unscale(self, optimizer: torch.optim.Optimizer, notes: StepNotes) -> None:
        inverse = 1 / self.get_scale()
        found = gradients(optimizer)
        # The norm is taken of the scaled gradients, so that unscaling is part of the update and not a pass of its own.
        notes.norms[optimizer] = total_norm(found) * inverse
        for gradient in found:
            gradient.mul_(inverse)

    @torch.no_grad()
    def clip_gradients_and_return_isfinite(
        self, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
    ) -> torch.Tensor | bool:
        """Unscales gradients that are still scaled, and clips their norm to `max_gradient_norm`, if there is one.

        Args:
            optimizers: An optimizer, or several.

        Returns:
            Whether all gradients were finite, as a boolean tensor of rank 0; True on the CPU backend.
        """
        chosen = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        return self._clip(chosen) if self._is_csx else True

    def _clip(self, optimizers: list[torch.optim.Optimizer]) -> torch.Tensor:
        notes = step_notes()
        for optimizer in optimizers:
            norm = None  # the user may have changed what was unscaled before
            if optimizer not in notes.norms:
                self._unscale(optimizer, notes)
                norm = notes.norms[optimizer]
            if self._max_gradient_norm is not None:
                clip_norm(optimizer, self._max_gradient_norm, norm)
        return _all_finite(notes, optimizers)

    def step_if_finite(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Performs a step of the optimizer, which, with its hooks, changes nothing if its gradients are not all finite.

        Args:
            optimizer: The optimizer. Its gradients are those of the scaled loss.
            *args: The arguments of its step.
            **kwargs: The arguments of its step.

        Returns:
            What its step returned.
        """
        if not self._is_csx:
            return optimizer.step(*args, **kwargs)
        with torch.no_grad():
            finite = self._clip([optimizer])
        update = ConditionalUpdate(optimizer)
        result = optimizer.step(*args, **kwargs)
        update.choose(finite)
        return result

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales and clips gradients, if not done yet, and updates; with a dynamic scale only if they are finite.

        Args:
            optimizer: The optimizer. Its gradients are those of the scaled loss.
            *args: The arguments of its step.
            **kwargs: The arguments of its step.

        Returns:
            What its step returned.
        """
        if self._has_state:
            return self.step_if_finite(optimizer, *args, **kwargs)
        self.clip_gradients_and_return_isfinite(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the step: computes the next dynamic scale from the gradients that were unscaled in it.

        Args:
            new_scale: The next scale, in place of the computed one.

        Raises:
            UsageError: No gradients were unscaled in this step, or the scale is static and a new one is given.
        """
        if new_scale is not None and not self._is_dynamic:
            raise UsageError("a static loss scale stays what it is: make the GradScaler with loss_scale='dynamic'")
        if not self._has_state:
            return
        self.update_scale(list(step_notes().norms))
        if new_scale is not None:
            with torch.no_grad():
                self._loss_scale.copy_(torch.as_tensor(new_scale, dtype=torch.float32))

    @torch.no_grad()
    def update_scale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Computes the next dynamic scale from the gradients of some optimizers.

        Args:
            optimizers: The optimizers.

        Raises:
            UsageError: Their gradients were not unscaled in this step.
        """
        if not self._has_state:
            return
        notes, chosen = step_notes(), list(optimizers)
        if not chosen or any(optimizer not in notes.norms for optimizer in chosen):
            raise UsageError("no gradients were unscaled in this step: call scaler.step(optimizer) before the update")
        overflow = ~_all_finite(notes, chosen)
        steps = self._steps_since_rescale + 1
        overflows = self._overflows_since_rescale + overflow
        is_halved = overflows > self._overflow_tolerance * steps
        is_doubled = ~is_halved & (steps >= self._steps_per_increase)
        is_kept = ~(is_halved | is_doubled)
        scale = self._loss_scale.clamp(self._smallest, self._largest)
        scale = torch.where(is_halved, scale / 2, torch.where(is_doubled, scale * 2, scale))
        self._loss_scale.copy_(scale.clamp(self._smallest, self._largest))
        self._steps_since_rescale.copy_(steps * is_kept)
        self._overflows_since_rescale.copy_(overflows * is_kept)
        self._num_skipped_steps.add_(overflow)


def _first_scale(scale: float) -> float:
    """Returns the first dynamic scale: the given one, or that of a checked run."""
    run = checked_run()
    return scale if run is None or run.settings.loss_scale is None else run.settings.loss_scale


def _all_finite(notes: StepNotes, optimizers: Iterable[torch.optim.Optimizer]) -> torch.Tensor:
    return functools.reduce(torch.logical_and, (notes.norms[optimizer] < math.inf for optimizer in optimizers))


# --- optimizer_step: from the loss to the updated weights, with or without a gradient scaler --------------------------


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """Performs one update, from `zero_grad` on: backward, unscale, clip, step, update of the scale.

    Args:
        loss: The loss of the step, of rank 0.
        optimizer: The optimizer of the parameters.
        grad_scaler: The scaler; None: gradients are not scaled.
        max_gradient_norm: The greatest norm over all gradients, to which they are clipped; None: no clipping.
        max_gradient_value: The greatest magnitude of an element of a gradient; excludes `max_gradient_norm`.

    Raises:
        ConfigurationError: Both limits are given, or one is negative.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise ConfigurationError("max_gradient_norm and max_gradient_value exclude each other: choose one")
    for name, limit in (("max_gradient_norm", max_gradient_norm), ("max_gradient_value", max_gradient_value)):
        if limit is not None and limit < 0:
            raise ConfigurationError(f"{name} must not be negative, got {limit}")
    optimizer.zero_grad()
    if grad_scaler is None:
        loss.backward()
    else:
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
    if max_gradient_norm is not None:
        clip_norm(optimizer, max_gradient_norm, unscaled_norm(optimizer))
    elif max_gradient_value is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, max_gradient_value)
    if grad_scaler is None:
        optimizer.step()
    else:
        grad_scaler.step(optimizer)
        grad_scaler.update()

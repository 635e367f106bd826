"""cstorch.amp, with a GradScaler that a plain loop calls: `scaler(loss).backward()`, then `optimizer.step()`."""

import itertools
import weakref
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cstorch._internal.generations import inherit
from cstorch._internal.tracing import is_tracing
from cstorch.amp import GradScaler as _GradScaler
from cstorch.amp import enable_mixed_precision, get_half_dtype, set_half_dtype
from cstorch.amp.updates import ConditionalUpdate, StepNotes, step_notes
from cstorch.errors import UsageError

__all__ = ["GradScaler", "get_init_params", "load_state_dict", "state_dict", "use_bfloat16"]

__getattr__ = inherit("cerebras_torch.amp", "cstorch.amp")


class GradScaler(_GradScaler):
    """cstorch.amp.GradScaler for plain loops.

    The step of the optimizer after a call unscales its gradients, and updates the scale. A loop has one optimizer.

    Args:
        loss_scale: "dynamic", or the static scale; None and 0 are 1.
        initial_loss_scale: The first dynamic scale; None: 2^15 for float16, 2^31 for cbfloat16, 1 for bfloat16.
        steps_per_increase: The number of steps without overflow after which the scale is doubled; None: 2000.
        min_loss_scale: The least dynamic scale; None: 2^-14.
        max_loss_scale: The greatest dynamic scale; None: the first one, or its default if that is greater.
        max_gradient_norm: The greatest norm over all gradients, to which they are clipped; None: no clipping.
        mixed_precision: Enables or disables mixed precision; None: it stays as it is.
        init_scale: The name of `initial_loss_scale` since 1.8.

    Raises:
        ConfigurationError: A setting is out of range.

    Reference: releases 1.2 to 1.7, `cerebras_torch.amp`.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"] | None = None,
        initial_loss_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        max_gradient_norm: float | None = None,
        mixed_precision: bool | None = None,
        init_scale: float | None = None,
    ) -> None:
        initial_loss_scale = init_scale if initial_loss_scale is None else initial_loss_scale
        self._init_params = {
            "loss_scale": loss_scale,
            "initial_loss_scale": initial_loss_scale,
            "steps_per_increase": steps_per_increase,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "max_gradient_norm": max_gradient_norm,
            "mixed_precision": mixed_precision,
        }
        if mixed_precision is not None:
            enable_mixed_precision(mixed_precision)
        super().__init__(
            loss_scale,
            initial_loss_scale,
            steps_per_increase,
            min_loss_scale,
            max_loss_scale,
            max_gradient_norm=max_gradient_norm,
        )
        self._scaled_in: weakref.ref[StepNotes] | None = None  # the step whose loss it has scaled
        self._pending: tuple[ConditionalUpdate, torch.Tensor] | None = None
        _scalers[next(_numbers)] = self

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the scaled loss, for its backward pass."""
        if self._is_csx:
            self._scaled_in = weakref.ref(step_notes())
        return self.scale(loss)

    def get_init_params(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, by name."""
        return dict(self._init_params)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_scaled():
            return
        if step_notes().norms.keys() - {optimizer}:
            raise UsageError("a GradScaler of cerebras_torch works for one optimizer: use that of cerebras.pytorch.amp")
        finite = self.clip_gradients_and_return_isfinite(optimizer)
        if self._has_state:
            assert isinstance(finite, torch.Tensor)
            self._pending = ConditionalUpdate(optimizer), finite

    def _after_step(self) -> None:
        if not self._has_scaled():
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            update, finite = pending
            update.choose(finite)
        self.update()

    def _has_scaled(self) -> bool:
        """Whether it has scaled the loss of the step that is being recorded."""
        return is_tracing() and self._scaled_in is not None and self._scaled_in() is step_notes()


class AmpState:
    """The half type, under its name in 1.8 and 1.9."""

    @property
    def half_dtype(self) -> torch.dtype:
        """The half type of mixed precision."""
        return get_half_dtype()


_amp_state = AmpState()

_numbers = itertools.count()
_scalers: "weakref.WeakValueDictionary[int, GradScaler]" = weakref.WeakValueDictionary()


def use_bfloat16(value: bool = True) -> None:
    """Makes bfloat16 the half type, or float16.

    Args:
        value: True for bfloat16.
    """
    set_half_dtype("bfloat16" if value else "float16")


def get_init_params() -> dict[str, Any]:
    """Returns the arguments of the newest GradScaler; nothing if there is none."""
    scaler = _newest()
    return {} if scaler is None else scaler.get_init_params()


def state_dict() -> dict[str, Any]:
    """Returns the state of the newest GradScaler; nothing if there is none."""
    scaler = _newest()
    return {} if scaler is None else scaler.state_dict()


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Loads the state of the newest GradScaler, if there is one.

    Args:
        state_dict: What `state_dict` returned.

    Raises:
        ValueError: Part of the state is missing.
    """
    scaler = _newest()
    if scaler is not None:
        scaler.load_state_dict(state_dict)


def _newest() -> GradScaler | None:
    scalers = list(_scalers.values())  # in the order in which they were made; none is collected from here on
    return scalers[-1] if scalers else None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for scaler in list(_scalers.values()):
        scaler._before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for scaler in list(_scalers.values()):
        scaler._after_step()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

"""Methods of torch that branch on values of states, replaced while a step is traced by forms without branches."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _VF, nn
from torch._higher_order_ops import utils as higher_order
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributions import constraints
from torch.nn.attention import flex_attention
from torch.nn.modules import module as nn_module
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import is_tracing
from cstorch._internal.tracing.rewrites import control_flow
from cstorch._internal.tracing.tensor import LazyTensor, from_cpu

Function = Callable[..., Any]


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Context that replaces the methods; only threads that trace call the replacements."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (*_PATCHES, *_of_quantization(), *_of_transformers()):
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _while_tracing(replacement, original))
        yield


def _while_tracing(replacement: Function, original: Function) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if is_tracing() else original(*args, **kwargs)

    return call


def _batch_norm(original: Function, self: _BatchNorm, input: torch.Tensor) -> Any:
    """Patches batch norm: with momentum=None its running statistics are means, for which torch reads the step count."""
    count, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
    if self.momentum is not None or not self.training or count is None or mean is None or variance is None:
        return original(self, input)
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    count.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    output = nn.functional.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for running, new in zip((mean, variance), of_batch, strict=True):
            running.add_((new - running) / count)
    return output


def _sync_batch_norm(original: Function, self: nn.SyncBatchNorm, input: torch.Tensor) -> Any:
    """All wafers together have the statistics of the whole batch anyway; torch's form requires GPUs."""
    return _BatchNorm.forward(self, input)


def _update_parameters(original: Function, self: AveragedModel, model: nn.Module) -> None:
    """The first update copies the model: torch.where on `n_averaged`, which is a state."""
    if not any(isinstance(parameter, LazyTensor) for parameter in self.module.parameters()):
        original(self, model)
        return
    if not isinstance(self.n_averaged, LazyTensor):  # torch makes it on the CPU, wherever the model is
        self.n_averaged = from_cpu(self.n_averaged)
    averaged = [tensor.detach() for tensor in _tensors(self.module, self.use_buffers)]
    current = [tensor.detach() for tensor in _tensors(model, self.use_buffers)]
    is_first = self.n_averaged == 0
    if self.multi_avg_fn is not None:
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for own, new in zip(averaged, current, strict=False):
            group = groups.setdefault(own.dtype, ([], []))
            group[0].append(own)
            group[1].append(new)
        for group in groups.values():
            self.multi_avg_fn(*group, self.n_averaged)
        results = averaged
    else:
        average = self.avg_fn or get_swa_avg_fn()
        results = [average(own, new, self.n_averaged) for own, new in zip(averaged, current, strict=False)]
    for own, new, result in zip(averaged, current, results, strict=False):
        own.copy_(torch.where(is_first, new, result))
    if not self.use_buffers:
        for own, new in zip(self.module.buffers(), model.buffers(), strict=True):
            own.detach().copy_(new.detach())
    self.n_averaged.add_(1)


def _tensors(module: nn.Module, with_buffers: bool) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers() if with_buffers else ())


def _is_causal_mask(
    original: Function, mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """torch uses the result only for a faster algorithm; the mask itself is applied in any case."""
    return is_causal is True


def _pack(original: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(input, LazyTensor) or any(isinstance(value, LazyTensor) for value in (*args, *kwargs.values())):
        raise messages.packed_sequence()
    return original(input, *args, **kwargs)


def _is_positive_definite(original: Function, self: Any, value: torch.Tensor) -> torch.Tensor:
    """torch's form tries a decomposition only if the matrices are symmetric."""
    return constraints.symmetric.check(value) & torch.linalg.cholesky_ex(value).info.eq(0)


def _is_positive_semidefinite(original: Function, self: Any, value: torch.Tensor) -> torch.Tensor:
    """As for a positive definite matrix."""
    return constraints.symmetric.check(value) & torch.linalg.eigvalsh(value).ge(0).all(-1)


def _step_of_scaler(original: Function, self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled():
        raise messages.own_grad_scaler()
    return original(self, *args, **kwargs)


def _total_norm(
    original: Function, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
) -> Any:
    """The norm of clip_grad_norm_, too."""
    if error_if_nonfinite:
        raise messages.error_if_not_finite()
    return original(tensors, norm_type, error_if_nonfinite, foreach)


def _check_tensor_all(original: Function, error_type: Any, cond: torch.Tensor, message: Any = None) -> None:
    """A check of values by torch or a package, such as the number of image tokens, is not made in a step."""
    if not isinstance(cond, LazyTensor):
        original(error_type, cond, message)


def _has_foreach(original: Function, device: torch.device) -> bool:
    """True, since `foreach` traces operations on lists of tensors."""
    return True


def _cond(original: Function, *args: Any, **kwargs: Any) -> Any:
    """torch's form imports dynamo, and warns of a predicate that is a Python value."""
    return control_flow.cond(*args, **kwargs)


def _uncompiled(original: Function, function: Function, args: Any, kwargs: Any = None) -> Any:
    """Operators that take functions run as they are; torch would compile them."""
    return function(*args, **(kwargs or {}))


def _validate_device(original: Function, query: torch.Tensor, *others: torch.Tensor) -> Any:
    if isinstance(query, LazyTensor):
        raise messages.flex_attention()
    return original(query, *others)


def _save_on_device(original: Function, self: save_on_cpu, *args: Any, **kwargs: Any) -> None:
    """The compiler decides where values are kept for the backward pass."""
    saved_tensors_hooks.__init__(self, lambda tensor: tensor, lambda tensor: tensor)


def _has_hooks_of_script(original: Function) -> bool:
    """Whether there are hooks on all modules besides the two of Scopes, of which a compiled module would warn."""
    forward = len(nn_module._global_forward_pre_hooks) + len(nn_module._global_forward_hooks)
    return forward + len(nn_module._global_backward_pre_hooks) + len(nn_module._global_backward_hooks) > 2


def _is_observed(original: Function, smallest: torch.Tensor, largest: torch.Tensor) -> bool:
    """torch's form compares the values, too."""
    return smallest.numel() > 0 and largest.numel() > 0


def _observe(original: Function, self: Any, x_orig: torch.Tensor) -> torch.Tensor:
    """An observer of quantization: the first batch begins the moving average."""
    if x_orig.numel() > 0:
        x = x_orig.detach().to(self.min_val.dtype)
        is_first = self.min_val.isinf() & self.max_val.isinf()
        for running, of_batch in ((self.min_val, x.amin()), (self.max_val, x.amax())):
            moved = running + self.averaging_constant * (of_batch - running)
            running.copy_(torch.where(is_first, of_batch, moved))
    return x_orig


def _scale_of_observer(original: Function, self: Any, smallest: torch.Tensor, largest: torch.Tensor) -> Any:
    """torch reads a scale without dimensions, to give it one."""
    return original(self, torch.atleast_1d(smallest), torch.atleast_1d(largest))  # type: ignore[no-untyped-call]


def _of_quantization() -> Iterator[tuple[Any, str, Function]]:
    """The observers of torch.ao.quantization, if imported."""
    observer: Any = sys.modules.get("torch.ao.quantization.observer")
    if hasattr(observer, "MovingAverageMinMaxObserver"):
        yield observer, "check_min_max_valid", _is_observed
        yield observer.MovingAverageMinMaxObserver, "forward", _observe
        yield observer.UniformQuantizationObserverBase, "_calculate_qparams", _scale_of_observer


def _of_transformers() -> Iterator[tuple[Any, str, Function]]:
    """Mixtures of experts of transformers, if imported: the shapes in its other forms depend on values."""
    experts: Any = sys.modules.get("transformers.integrations.moe")
    if hasattr(experts, "ExpertsInterface") and hasattr(experts, "batched_mm_experts_forward"):
        batched = experts.batched_mm_experts_forward

        def get_interface(original: Function, self: Any, implementation: str | None, default: Function) -> Function:
            is_own = implementation is not None and implementation not in _FORMS_OF_EXPERTS
            return original(self, implementation, default) if is_own else batched

        yield experts.ExpertsInterface, "get_interface", get_interface


_FORMS_OF_EXPERTS = frozenset({"eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe"})
_PATCHES: tuple[tuple[Any, str, Function], ...] = (
    (_BatchNorm, "forward", _batch_norm),
    (nn.SyncBatchNorm, "forward", _sync_batch_norm),
    (AveragedModel, "update_parameters", _update_parameters),
    (_VF, "_pack_padded_sequence", _pack),
    (type(constraints.positive_definite), "check", _is_positive_definite),
    (type(constraints.positive_semidefinite), "check", _is_positive_semidefinite),
    (torch, "_check_tensor_all_with", _check_tensor_all),
    (torch.amp.GradScaler, "step", _step_of_scaler),
    (torch.amp.GradScaler, "unscale_", _step_of_scaler),
    (clip_grad, "_get_total_norm", _total_norm),
    (nn.utils, "get_total_norm", _total_norm),
    (clip_grad, "_device_has_foreach_support", _has_foreach),
    (torch, "cond", _cond),
    (higher_order, "_hop_compile_and_call", _uncompiled),
    (flex_attention, "_validate_device", _validate_device),
    (nn_module, "_has_any_global_hook", _has_hooks_of_script),
    (save_on_cpu, "__init__", _save_on_device),
    (transformer, "_detect_is_causal_mask", _is_causal_mask),
)

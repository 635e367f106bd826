"""Fake quantization, by which a model is trained for integers: rounded values, with the gradient of no rounding."""

from collections.abc import Callable
from typing import Any, Final

import torch

from cstorch._internal.tracing.provenance import user_line
from cstorch.errors import TraceError

# torch takes this scale for a range whose own is zero, and no scale below the other one.
_SCALE_OF_NOTHING: Final = 0.1
_SMALLEST_SCALE: Final = 6.1e-5

Number = torch.Tensor | float


class _FakeQuantized(torch.autograd.Function):
    """Numbers rounded to multiples of a scale, as torch's kernels of the CPU do; the gradient is that in the range."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, scale: torch.Tensor, zero_point: Number, lowest: int, highest: int
    ) -> torch.Tensor:
        scaled = (input if input.dtype is torch.float64 else input.float()) * scale.reciprocal()
        if isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point():
            level = (scaled + zero_point).round()
            scale, zero_point = scale.double(), zero_point.double()
        else:
            level = scaled.round() + zero_point
        ctx.save_for_backward((level >= lowest) & (level <= highest))
        steps = level.clamp(lowest, highest) - zero_point
        return ((steps if scale.dim() else steps.float()) * scale).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None, None


def _fake_quantized(
    input: torch.Tensor, scale: torch.Tensor, zero_point: Number, lowest: int, highest: int
) -> torch.Tensor:
    result: torch.Tensor = _FakeQuantized.apply(input, scale, zero_point, lowest, highest)  # type: ignore[no-untyped-call]  # torch has no types of it
    return result


def per_tensor(input: torch.Tensor, scale: Number, zero_point: Number, quant_min: int, quant_max: int) -> torch.Tensor:
    """torch.fake_quantize_per_tensor_affine, with numbers or tensors of one element."""
    if isinstance(zero_point, torch.Tensor):
        zero_point = zero_point.reshape(())
    return _fake_quantized(
        input, torch.as_tensor(scale, dtype=torch.float32).reshape(()), zero_point, quant_min, quant_max
    )


def per_channel(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
) -> torch.Tensor:
    """torch.fake_quantize_per_channel_affine."""
    shape = [-1 if dimension == axis % input.dim() else 1 for dimension in range(input.dim())]
    return _fake_quantized(input, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)


def moving_average(
    input: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> torch.Tensor:
    """torch.fused_moving_avg_obs_fake_quant: the scale follows a moving average of the smallest and largest numbers."""
    if per_row_fake_quant and running_min.numel() != input.shape[ch_axis]:
        raise TraceError(
            f"at {user_line()} the observer of a tensor of {input.shape[ch_axis]} channels has statistics of "
            f"{running_min.numel()}, and in a step tensors keep their sizes. Call the prepared model once on the CPU, "
            "with any batch, before cstorch.compile; or observe whole tensors"
        )
    with torch.no_grad():
        others = [dimension for dimension in range(input.dim()) if dimension != ch_axis or not per_row_fake_quant]
        is_on, is_rounded = (observer_on != 0).reshape(()), (fake_quant_on != 0).reshape(())
        for running, of_batch in ((running_min, input.amin(others)), (running_max, input.amax(others))):
            moved = running + averaging_const * (of_batch - running)
            running.copy_(torch.where(is_on, torch.where(running.isinf(), of_batch, moved), running))
        chosen = _parameters(running_min, running_max, quant_min, quant_max, symmetric_quant)
        for parameter, new in zip((scale, zero_point), chosen, strict=True):
            parameter.copy_(torch.where(is_rounded, new.to(parameter.dtype), parameter))
    if per_row_fake_quant:
        result = per_channel(input, scale, zero_point, ch_axis, quant_min, quant_max)
    else:
        result = per_tensor(input, scale, zero_point, quant_min, quant_max)
    return torch.where(is_rounded, result, input)


def _parameters(
    smallest: torch.Tensor, largest: torch.Tensor, quant_min: int, quant_max: int, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scale and the zero point for numbers of a range, as torch's ChooseQuantizationParams does."""
    low, high = smallest.double(), largest.double()
    is_centred = (low < 0) & (high > 0) & is_symmetric
    half = (quant_max - quant_min) // 2
    reach = torch.maximum((low / (half + 1)).abs(), (high / half).abs())
    low, high = torch.where(is_centred, -reach * (half + 1), low), torch.where(is_centred, reach * half, high)
    low, high = low.clamp(max=0).float().double(), high.clamp(min=0).float().double()
    scale = (high - low) / (quant_max - quant_min)
    scale = torch.where((scale.float() == 0) | scale.float().reciprocal().isinf(), _SCALE_OF_NOTHING, scale)
    grown = (_SMALLEST_SCALE / scale).clamp(min=1)
    scale, low, high = scale * grown, low * grown, high * grown
    from_low, from_high = quant_min - low / scale, quant_max - high / scale
    error_of_low, error_of_high = abs(quant_min) - (low / scale).abs(), abs(quant_max) - (high / scale).abs()
    zero = torch.where(error_of_low < error_of_high, from_low, from_high)
    zero = torch.where(is_centred, (quant_min + quant_max) / 2, zero)
    return scale, zero.clamp(quant_min, quant_max).round()


FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.fake_quantize_per_tensor_affine: per_tensor,
    torch.fake_quantize_per_channel_affine: per_channel,
    torch.fused_moving_avg_obs_fake_quant: moving_average,
}

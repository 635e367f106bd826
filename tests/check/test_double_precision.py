"""Steps of plain PyTorch in float64: whatever the step asks for in float32 is float64."""

import torch
from torch import nn

from cstorch._internal.check.double_precision import DoublePrecision


def test_what_a_step_makes_in_float32_is_float64() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).double()
    images = torch.randint(256, (2, 1, 4, 4), dtype=torch.uint8)
    weight = torch.rand(4, dtype=torch.float64, requires_grad=True)
    with DoublePrecision():
        loss = model(images.float() / 255).square().mean() + (weight.float() * torch.ones(4)).sum()
        loss.backward()
        made = [
            images.to(torch.float32),
            images.sum(dtype=torch.float32),
            torch.zeros(3, dtype=torch.float32),
            torch.rand(2),
            weight.to(dtype=torch.float32),
        ]
    assert loss.dtype is torch.float64
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float64
    assert {tensor.dtype for tensor in made} == {torch.float64}
    assert torch.get_default_dtype() is torch.float32
    assert torch.zeros(3, dtype=torch.float32).dtype is torch.float32

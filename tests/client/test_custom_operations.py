"""Operations of torch.library.custom_op in a step: traced as the operations of their Python functions."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from traced_steps import Runner, X, linear, states_of, trace, trace_behind_linear

from cstorch._internal.lowering import lower
from cstorch._internal.tracing.device.dispatch import device_scope
from cstorch.errors import CompileError, TraceError


@torch.library.custom_op("waferbox_test::gated", mutates_args=())
def gated(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    y = x.clone()
    y[x < 0] = 0
    return y * factor + torch.ones(3, device=x.device)


@gated.register_fake
def _(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return torch.empty_like(x)


gated.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("waferbox_test::doubled_", mutates_args={"x"}, device_types="cpu")
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("waferbox_test::parts", mutates_args=())
def parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.exp(), gated(x, 2.0), x.sum()]


@torch.library.custom_op("waferbox_test::of_numpy", mutates_args=())
def of_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@torch.library.custom_op("waferbox_test::of_cuda", mutates_args=(), device_types="cuda")
def of_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.cuda()


@of_cuda.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_values_and_gradients() -> None:
    model, reference = linear()

    def results(model: nn.Linear, x: torch.Tensor) -> Iterator[torch.Tensor]:
        y = model(x)
        made = gated(y, factor=3.0)
        yield made.detach()
        yield from torch.autograd.grad((made * made.detach()).sum(), list(model.parameters()))
        changed = y.detach().clone()
        doubled_(changed)
        yield changed
        yield from parts(y.detach())

    traced = trace(lambda x: list(results(model, x)), X, states_of(model=model), model)
    lower(traced)
    for result, expected in zip(Runner(traced).step(X), results(reference, X), strict=True):
        torch.testing.assert_close(result, expected)


def test_outside_of_a_step() -> None:
    with device_scope():
        made = gated(torch.full((3,), 2.0))
    assert made.tolist() == [3.0] * 3


def test_a_function_that_cannot_be_traced() -> None:
    with pytest.raises(TraceError, match=r"test_custom_operations.py:\d+ the value of a traced tensor is needed"):
        trace_behind_linear(lambda y: of_numpy(y.detach()))
    with pytest.raises(CompileError, match="does not support `waferbox_test::of_cuda`"):
        lower(trace_behind_linear(lambda y: of_cuda(y.detach())))

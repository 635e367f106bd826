"""Batch norm on several wafers is that of the whole batch: result, gradients and running statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from plan_simulator import Simulation
from torch import nn

from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity

NATIVE = "aten._native_batch_norm_legit_functional"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batch_first(x: torch.Tensor) -> torch.Tensor:
    return x


class Norm(nn.Module):
    """A layer around a norm; `enter` brings the input, which begins with the batch, into the norm's form."""

    def __init__(self, norm: nn.Module, enter: Callable[[torch.Tensor], torch.Tensor] = batch_first) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm, self.enter = norm, enter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.enter(x * self.scale))


def trained(model: Any) -> Step:
    """Results and gradients of the model as it is, in training or evaluation."""

    def step(x: torch.Tensor) -> Any:
        result = model(x)
        (result * result.detach().cos()).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [result.detach(), *gradients]

    return step


CASES: dict[str, tuple[Callable[[], Norm], tuple[int, ...]]] = {
    "vectors": (lambda: Norm(nn.BatchNorm1d(6)), (6,)),
    "rows": (lambda: Norm(nn.BatchNorm1d(6, momentum=0.3)), (6, 5)),
    "images": (lambda: Norm(nn.BatchNorm2d(4, eps=0.1)), (4, 3, 3)),
    "volumes": (lambda: Norm(nn.BatchNorm3d(4)), (4, 2, 3, 2)),
    "without-weights": (lambda: Norm(nn.BatchNorm2d(4, affine=False)), (4, 3, 3)),
    "without-running-statistics": (lambda: Norm(nn.BatchNorm2d(4, track_running_stats=False)), (4, 3, 3)),
    "batch-behind-time": (lambda: Norm(nn.BatchNorm1d(6), lambda x: x.transpose(0, 1).reshape(-1, 6)), (5, 6)),
    "batch-in-the-last-dimension": (lambda: Norm(nn.BatchNorm1d(6), lambda x: x.permute(2, 1, 0)), (6, 5)),
    "samples-as-channels": (
        lambda: Norm(nn.BatchNorm1d(BATCH, affine=False, track_running_stats=False), lambda x: x.transpose(0, 1)),
        (5, 3),
    ),
    "of-each-sample": (lambda: Norm(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), (4, 3, 3)),
    "in-groups": (lambda: Norm(nn.GroupNorm(2, 4)), (4, 3, 3)),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_norms(name: str, training: bool) -> None:
    make, shape = CASES[name]
    model = make().train(training)
    running = {key: value for key, value in model.norm.named_buffers() if key.startswith("running")}
    for value in (*running.values(), *model.norm.parameters()):
        nn.init.uniform_(value, 0.5, 2)
    batches = [torch.randn(BATCH, *shape, dtype=torch.float64) * 3 + 1 for _ in range(2)]
    traced = Traced(trained, model, batches[0])
    traced.check(batches, [(1, 1), (2, 2), (3, 1)])
    _, states = traced.expected(batches)
    for key in running:
        state = f"state.model.norm.{key}"
        assert torch.equal(states[state], traced.initial[state]) != training


def images() -> torch.Tensor:
    return torch.randn(BATCH, 4, 6, 6, dtype=torch.float64)


def test_one_wafer_keeps_the_native_operation() -> None:
    traced = Traced(trained, Norm(nn.BatchNorm2d(4)), images())

    def native(wafers: int) -> list[bool]:
        return [NATIVE in kernel.cirh for kernel in traced.plan(wafers).wafer.kernels]

    assert any(native(1))
    assert not any(native(2))


def test_the_wafers_wait_three_times_for_the_whole_batch() -> None:
    """For the mean, the variance, and both sums of the backward pass; never for MemoryX."""

    def waits(norm: nn.Module) -> tuple[int, int]:
        groups = Traced(trained, Norm(norm), images()).plan(2).swarmx.groups
        streamed = sum(group.kind == plan_pb2.GROUP_KIND_WEIGHTS for group in groups)
        return sum(group.to_wafers for group in groups), streamed

    assert waits(nn.BatchNorm2d(4)) == (3, 1)
    assert waits(nn.GroupNorm(2, 4)) == (0, 1)


def test_a_weight_for_each_sample() -> None:
    model = Norm(nn.BatchNorm1d(BATCH), lambda x: x.transpose(0, 1))
    batch = torch.randn(BATCH, 5, 3, dtype=torch.float64)
    Traced(trained, model, batch).check([batch], [(1, 1), (2, 1)])


def test_a_variance_that_is_small_beside_the_mean_keeps_its_digits() -> None:
    """In float32, several wafers are as near to the true result as torch's own operation is."""
    x = 1000 + 0.1 * torch.randn(BATCH, 4, 6, 6)
    model = Norm(nn.BatchNorm2d(4))
    nn.init.ones_(model.scale).requires_grad_(False)  # its gradient is nearly zero, made of large numbers
    (exact,), _ = Traced(trained, model, x.double()).expected([x.double()])
    traced = Traced(trained, model, x, double=False)
    (native,), _ = traced.expected([x])
    (parts,) = Simulation(traced.plan(3), traced.initial).run([[x]], 0)
    for part, whole, true in zip(parts.values(), native, exact, strict=True):
        assert (part - true).abs().max() <= 2 * (whole - true).abs().max()

"""Models that are larger than a wafer's memory train on real processes as in plain PyTorch."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import batches
import pytest
import torch
import torch.nn.functional as F
from cluster_rig import RunningCluster
from torch import nn

import cerebras.pytorch as cstorch
from cstorch._internal.session.execution import compiling
from wsc.v1 import plan_pb2

ROWS, WIDTH, LAYERS, STEPS = 4096, 32, 16, 4
ACTIVATION_BYTES = 2 * LAYERS * ROWS * WIDTH * 4  # before and behind each nonlinearity

pytestmark = pytest.mark.cluster


# Weights of 64 MiB, and memory for a quarter of their gradients.
WIDE, WIDE_LAYERS = 512, 64
FEW_BYTES = 34 << 20


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * F.gelu(self.linear(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def wide_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(WIDE_LAYERS)))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def plain(model: nn.Module, given: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in given:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(
    model: nn.Module,
    given: list[torch.Tensor],
    memory_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    num_csx: int = 1,
) -> str:
    """Compares losses and weights with those of plain PyTorch, on wafers with so much memory. Returns the messages."""
    options = compiling._compile_options

    def with_little_memory() -> plan_pb2.CompileOptions:
        made = options()
        made.wafer_memory_bytes = memory_bytes
        return made

    monkeypatch.setattr(compiling, "_compile_options", with_little_memory)
    expected = copy.deepcopy(model)
    expected_losses = plain(expected, given)
    config = cstorch.distributed.ClusterConfig(num_csx=num_csx)
    compiled = cstorch.compile(model, cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config))
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    keep = cstorch.step_closure(lambda loss: losses.append(loss.item()))
    with caplog.at_level(logging.INFO, "cstorch"):
        for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches.input_fn, given)):
            keep(step(batch))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), weight, rtol=1e-5, atol=1e-6)
    return "\n".join(caplog.messages)


def test_activations_of_eight_times_a_wafers_memory(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    given = [torch.randn(ROWS, WIDTH) for _ in range(STEPS)]
    messages = compare(network(), given, ACTIVATION_BYTES // 8, monkeypatch, caplog, tmp_path)
    assert f"Each wafer computes its {ROWS} rows in " in messages


@pytest.mark.parametrize("num_csx", [1, 2])
def test_gradients_of_more_than_a_wafers_memory(
    cluster: RunningCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    num_csx: int,
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(1)
    given = [torch.randn(64 * num_csx, WIDE) for _ in range(STEPS)]
    messages = compare(wide_network(), given, FEW_BYTES, monkeypatch, caplog, tmp_path, num_csx)
    assert "MemoryX adds the gradients" in messages

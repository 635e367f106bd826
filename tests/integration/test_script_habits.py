"""What scripts of several releases do in a step, on a running cluster beside the CPU."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_rig import RunningCluster
from torch import nn
from torch.nn import functional as F

import cerebras.pytorch as cstorch

ROWS, FEATURES, CLASSES = 8, 6, 3

Step = Callable[[list[torch.Tensor]], torch.Tensor]

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def on_cluster(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


def input_fn() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS, dtype=torch.int32) % CLASSES
    return [[torch.randn(ROWS, FEATURES, generator=generator), labels] for _ in range(4)]


def made(kind: str, folder: Path, num_csx: int) -> tuple[nn.Module, Any]:
    config = cstorch.distributed.ClusterConfig(num_csx=num_csx) if kind == "CSX" else None
    backend = cstorch.backend(kind, artifact_dir=folder / kind, cluster_config=config)
    torch.manual_seed(0)
    with backend.device:
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    return model, cstorch.compile(model, backend)


def executor() -> Any:
    return cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn))


def test_a_constant_is_an_output_under_mixed_precision(tmp_path: Path) -> None:
    cstorch.amp.enable_mixed_precision(True)
    model, compiled = made("CSX", tmp_path, 1)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)
    schedule = cstorch.optim.lr_scheduler.ConstantLR(optimizer, 0.25)
    seen: list[list[float]] = []

    @cstorch.step_closure
    def report(*values: torch.Tensor) -> None:
        seen.append([value.item() for value in values])

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(compiled(batch[0]), batch[1].long())
        optimizer.zero_grad()
        loss.backward()
        report(torch.as_tensor(optimizer.param_groups[0]["lr"]), torch.tensor(3.0).to(loss.device))
        optimizer.step()
        schedule.step()
        report(torch.as_tensor(schedule.get_last_lr()[0]))
        return loss

    for batch in executor():
        step(batch)
    assert seen == [[0.25, 3.0], [0.25]] * 4


@pytest.mark.parametrize("num_csx", [1, 2])
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_int32_labels_in_a_step_without_backward(tmp_path: Path, loss: str, num_csx: int) -> None:
    losses: dict[str, list[float]] = {"CPU": [], "CSX": []}
    for kind, seen in losses.items():
        model, compiled = made(kind, tmp_path, num_csx)
        model.eval()

        @cstorch.trace
        @torch.no_grad()
        def step(batch: list[torch.Tensor], compiled: Any = compiled, kind: str = kind) -> torch.Tensor:
            scores = F.log_softmax(compiled(batch[0]), 1)
            value: torch.Tensor = getattr(F, loss)(scores, batch[1] if kind == "CSX" else batch[1].long())
            return value

        @cstorch.step_closure
        def report(value: torch.Tensor, seen: list[float] = seen) -> None:
            seen.append(value.item())

        for batch in executor():
            report(step(batch))
        cstorch.close_backend()
    assert losses["CSX"] == pytest.approx(losses["CPU"], rel=1e-6)


@pytest.mark.parametrize("num_csx", [1, 2])
def test_chosen_elements_are_trained_as_on_the_cpu(tmp_path: Path, num_csx: int) -> None:
    weights: dict[str, list[Any]] = {"CPU": [], "CSX": []}
    for kind, found in weights.items():
        model, compiled = made(kind, tmp_path, num_csx)
        model.apply(cstorch.nn.SelectiveGrad("*.weight", lambda parameter: parameter > 0))
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

        @cstorch.trace
        def step(batch: list[torch.Tensor], compiled: Any = compiled, optimizer: Any = optimizer) -> torch.Tensor:
            loss = F.cross_entropy(compiled(batch[0]), batch[1].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        first = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        run = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), checkpoint_steps=4)
        for batch in run:
            step(batch)
        found += [parameter.detach().cpu() for parameter in model.parameters()]
        for before, after in zip(first, found, strict=True):
            if before.dim() == 2:
                assert torch.equal(after[before <= 0], before[before <= 0])
                assert not torch.isclose(after[before > 0], before[before > 0]).any()
        cstorch.close_backend()
    for ours, theirs in zip(weights["CSX"], weights["CPU"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("release", ["2.0", "2.6"])
def test_an_installation_is_checked_by_a_compile(tmp_path: Path, cluster: RunningCluster, release: str) -> None:
    """As the releases' own checks do it: inputs in float16, labels in int32, and a model in float32."""
    api: Any = cstorch if release == "2.6" else import_module("cerebras_pytorch")
    config = {"mgmt_address": cluster.management, "mgmt_namespace": None}
    if release == "2.6":
        in_backend, in_executor = {"cluster_config": api.distributed.ClusterConfig(**config)}, {}
    else:
        in_backend, in_executor = {}, {"cs_config": api.utils.CSConfig(**config)}
    backend = api.backend("CSX", artifact_dir=tmp_path, compile_only=True, validate_only=False, **in_backend)
    model = api.compile(nn.Linear(10, 2), backend=backend)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = api.optim.SGD(model.parameters(), lr=0.001)

    def one_sample(batch_size: int, dtype: torch.dtype = torch.float16) -> Any:
        sample = [torch.ones(10, dtype=dtype), torch.tensor(0, dtype=torch.int32)]
        return torch.utils.data.DataLoader(api.utils.data.SyntheticDataset(sample, num_samples=1), batch_size)

    trace: Callable[[Step], Step] = api.trace

    @trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss: torch.Tensor = loss_fn(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    executor = api.utils.data.DataExecutor(api.utils.data.DataLoader(one_sample, 1), num_steps=1, **in_executor)
    for batch in executor:
        training_step(batch)

"""Trains a network on scikit-learn's digits in mixed precision, on a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

BATCH = 128


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def input_fn() -> DataLoader[Any]:
    from sklearn.datasets import load_digits  # not where tests are only collected: it takes a second

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    return DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=BATCH, drop_last=True)


def input_of_the_scripts_type() -> DataLoader[Any]:
    """The same, as an input_fn makes it that asks how the step is compiled."""
    dataset = input_fn().dataset
    assert isinstance(dataset, TensorDataset)
    images = dataset.tensors[0].to(cstorch.amp.get_floating_point_dtype())
    return DataLoader(TensorDataset(images, dataset.tensors[1]), batch_size=BATCH, drop_last=True)


def train(
    artifact_dir: Path,
    model: Network,
    half: Literal["float16", "bfloat16", "cbfloat16"],
    level: int,
    num_csx: int,
    num_steps: int,
    init_scale: float | None = None,
    source: Callable[[], DataLoader[Any]] = input_fn,
    half_gradients: bool = False,
    micro_batch_size: int | None = None,
) -> tuple[list[float], dict[str, float]]:
    """The losses of all steps, and, with an init_scale, the state of the dynamic loss scale after them."""
    cstorch.amp.set_half_dtype(half)
    cstorch.amp.enable_mixed_precision()
    cstorch.backends.csx.precision.optimization_level = level
    cstorch.backends.csx.precision.half_gradients = half_gradients
    cstorch.backends.csx.performance.micro_batch_size = micro_batch_size
    config = cstorch.distributed.ClusterConfig(num_csx=num_csx, max_wgt_servers=2)
    backend = cstorch.backend("CSX", artifact_dir=artifact_dir, cluster_config=config)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = None if init_scale is None else cstorch.amp.GradScaler("dynamic", init_scale, max_loss_scale=init_scale)
    losses: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(compiled(images), labels)
        cstorch.amp.optimizer_step(loss, optimizer, scaler)
        return loss

    @cstorch.step_closure
    def keep(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    loader = cstorch.utils.data.DataLoader(source)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=num_steps):
        keep(step(batch))
    return losses, {} if scaler is None else {name: float(value) for name, value in scaler.state_dict().items()}

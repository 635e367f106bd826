"""An input_fn that reads a variable of its module, an environment variable, and torch's default type."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

SCALE = 1.0
ROWS, FEATURES, STEPS = 4, 3, 3


def input_fn(scale: float | None = None) -> DataLoader[Any]:
    scale = SCALE if scale is None else scale
    offset = float(os.environ.get("OFFSET", "0"))
    values = torch.arange(ROWS * FEATURES, dtype=torch.get_default_dtype()).reshape(ROWS, FEATURES)
    return DataLoader(TensorDataset(values * scale + offset), ROWS, shuffle=True)


def train(folder: Path, *arguments: float, num_csx: int = 1, executions: int = 1) -> list[float]:
    """The sums of the batches of the executions."""
    config = cstorch.distributed.ClusterConfig(num_csx=num_csx)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    compiled = cstorch.compile(nn.Identity(), backend)
    sums: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compiled(batch[0]).sum()

    @cstorch.step_closure
    def note(total: torch.Tensor) -> None:
        sums.append(total.item())

    for _ in range(executions):
        loader = cstorch.utils.data.DataLoader(input_fn, *arguments)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
            note(step(batch))
    cstorch.close_backend()
    return sums

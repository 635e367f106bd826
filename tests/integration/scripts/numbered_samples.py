"""Questions and answers in pairs, whose labels are the numbers of the answers: each wafer makes its own part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

BATCH_SIZE, FEATURES, STEPS = 8, 6, 3


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    questions, answers = torch.randn(2, BATCH_SIZE, FEATURES, generator=generator)
    return questions, answers


def input_fn(counts_on: bool) -> DataLoader[Any]:
    """counts_on: from the samples of the wafers before."""
    rows = cstorch.distributed.get_streaming_batch_size(BATCH_SIZE)
    first = cstorch.distributed.get_streaming_rank() * rows
    own = slice(first, first + rows)
    questions, answers = samples()
    numbers = torch.arange(rows) + (first if counts_on else 0)
    return DataLoader(TensorDataset(questions[own], answers[own], numbers), rows)


def loss_of(
    model: Callable[[torch.Tensor], torch.Tensor],
    questions: torch.Tensor,
    answers: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Of the scores of all questions with all answers."""
    return F.cross_entropy(model(questions) @ model(answers).T, numbers)


def train(folder: Path, *, counts_on: bool) -> list[float]:
    """The losses of two executions on two wafers."""
    config = cstorch.distributed.ClusterConfig(num_csx=2)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, 4)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.3)

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = loss_of(compiled, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses: list[float] = []

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    for _ in range(2):
        loader = cstorch.utils.data.DataLoader(input_fn, counts_on)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
            note(step(batch))
    return losses


def plain() -> list[float]:
    """The losses of plain PyTorch on the whole batch."""
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(2 * STEPS):
        loss = loss_of(model, *samples(), torch.arange(BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

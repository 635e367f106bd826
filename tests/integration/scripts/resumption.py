"""Training in two halves: the batches come in the same order each time, and a checkpoint lies between."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from parity import CLASSES, FEATURES, Network
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

BATCHES = 5  # of a pass: a half begins with a pass
SCHEDULED_STEPS = 40


def input_fn(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(BATCHES * batch_size, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (BATCHES * batch_size,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size)


def train(
    folder: Path, *, num_steps: int, load: Path | None = None, checkpoint_steps: int | None = None
) -> dict[str, torch.Tensor]:
    """Trains on 2 wafers with 2 shards; writes checkpoint_<step>.mdl, and returns the weights."""
    config = cstorch.distributed.ClusterConfig(num_csx=2, max_wgt_servers=2)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    torch.manual_seed(0 if load is None else 1)  # what is loaded does not depend on what was there
    with backend.device:
        model = Network()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    scheduler = cstorch.optim.lr_scheduler.LinearLR(
        optimizer, initial_learning_rate=0.01, end_learning_rate=0.001, total_iters=SCHEDULED_STEPS
    )
    if load is not None:
        state = cstorch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    @cstorch.checkpoint_closure
    def save_checkpoint(number: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        cstorch.save(state, folder / f"checkpoint_{number}.mdl")

    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(input_fn, 16), num_steps=num_steps, checkpoint_steps=checkpoint_steps
    )
    for batch in executor:
        step(batch)
        save_checkpoint(executor.user_iteration)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def held_out_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits that examples/fc_digits/train.py does not train on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = torch.arange(len(labels)) % 5 == 0
    return torch.tensor(images / 16, dtype=torch.float32)[rows], torch.tensor(labels)[rows]

"""Trains a small GPT on two wafers, and prints its losses bit for bit."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpt import GPT, GPTSettings, token_loss

SIZE = GPTSettings(vocabulary=96, width=64, layers=2, heads=4, sequence=24)
BATCH, STEPS = 8, 12


def batches() -> DataLoader:
    tokens = torch.randint(SIZE.vocabulary, (BATCH * 5, SIZE.sequence + 1), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)


def main() -> None:
    torch.manual_seed(0)
    config = cstorch.distributed.ClusterConfig(num_csx=2)
    backend = cstorch.backend("CSX", artifact_dir=Path("artifacts"), cluster_config=config)
    with backend.device:
        model = GPT(SIZE)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.003)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, targets = batch
        loss = token_loss(compiled(tokens), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    @cstorch.step_closure
    def show(loss: torch.Tensor) -> None:
        print(float(loss).hex(), flush=True)

    loader = cstorch.utils.data.DataLoader(batches)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
        show(training_step(batch))


if __name__ == "__main__":
    main()

"""Trains for 20 steps, bit for bit as it says, and waits after the tenth for a line on standard input.

`python patient.py FOLDER`.
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


def batches(batch_size: int) -> DataLoader:
    features = torch.randn(4 * batch_size, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.argmax(1)), batch_size)


def main() -> None:
    torch.manual_seed(0)
    config = cstorch.distributed.ClusterConfig(num_csx=2, run_ahead_steps=1)
    backend = cstorch.backend("CSX", artifact_dir=Path(sys.argv[1]), cluster_config=config)
    with backend.device:
        model = nn.Linear(8, 8)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor) -> None:
        print(f"step {executor.user_iteration}: {loss.item().hex()}", flush=True)
        if executor.user_iteration == 10:
            sys.stdin.readline()

    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches, 16), num_steps=20)
    for batch in executor:
        report(training_step(batch))
    for name, value in model.state_dict().items():
        print(name, hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()

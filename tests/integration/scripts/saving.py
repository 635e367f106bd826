"""Trains a small network and saves its weights; stops before the first is read, until it is told to go on.

python saving.py (checkpoint | final) --artifacts FOLDER [--lane LANE]; prints "saving" when it is there, and goes on
when the file "go" is in the working directory.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from faults import CLASSES, FEATURES, good

import cerebras.pytorch as cstorch
from cstorch._internal.session.transfer import ShardConnection

STEPS = 4


def stop_before_the_first_read() -> None:
    """The connection to the shard is open: the initial weights went over it."""
    read = ShardConnection.read
    told: list[bool] = []

    def stopping(
        self: ShardConnection, name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int
    ) -> Iterator[torch.Tensor]:
        if not told:
            told.append(True)
            print("saving", flush=True)
            while not Path("go").exists():
                time.sleep(0.01)
        yield from read(self, name, shape, dtype, step)

    ShardConnection.read = stopping  # type: ignore[method-assign]  # it is the read of this process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("when", choices=["checkpoint", "final"])
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--lane", default="auto")
    options = parser.parse_args()
    stop_before_the_first_read()
    config = cstorch.distributed.ClusterConfig(num_csx=1, lane=options.lane)
    backend = cstorch.backend("CSX", artifact_dir=options.artifacts, cluster_config=config)
    with backend.device:
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape)  # so that they are sent, and not made on the cluster
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.checkpoint_closure
    def save() -> None:
        cstorch.save({"model": model.state_dict()}, str(options.artifacts / f"{executor.user_iteration}.mdl"))

    loader = cstorch.utils.data.DataLoader(good, 8)
    checkpoint_steps = STEPS // 2 if options.when == "checkpoint" else 0
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=STEPS, checkpoint_steps=checkpoint_steps)
    for batch in executor:
        training_step(batch)
        save()
    if options.when == "final":
        cstorch.save({"model": model.state_dict()}, str(options.artifacts / "final.mdl"))
    print("done", flush=True)


if __name__ == "__main__":
    main()

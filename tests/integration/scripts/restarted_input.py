"""Training whose input can be restarted: every worker yields its own part of shuffled batches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from parity import CLASSES, FEATURES, Network
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cerebras.pytorch.distributed import get_worker_state

BATCH_SIZE = 8
BATCHES = 5  # of a pass


class Pair(NamedTuple):
    features: torch.Tensor
    labels: torch.Tensor


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """A nest with more in it than tensors."""
    features, labels = zip(*rows, strict=True)
    return {"pair": [Pair(torch.stack(features), torch.stack(labels))], "name": "random", "times": 2, "nothing": None}


class Restartable(DataLoader[Any]):
    """Keeps how many samples all workers have streamed together."""

    before = 0

    def state_dict(self) -> dict[str, Any]:
        state = get_worker_state()
        return {"samples": state.samples_streamed, "before": self.before, "step": state.appliance_step}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        (step,) = {state["step"] for state in worker_states}
        samples = worker_states[0]["before"] + sum(state["samples"] for state in worker_states)
        return {"samples": samples, "step": step, "workers": len(worker_states)}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any]) -> dict[str, Any]:
        return aggregated_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["samples"]
        assert isinstance(self.batch_sampler, cstorch.utils.data.DistributedSampler)
        self.batch_sampler.set_state(self.before)


def input_fn(folder: str, batch_size: int) -> DataLoader[Any]:
    dist = cstorch.distributed
    scale = 1.0
    if dist.is_streamer():
        import only_on_workers  # type: ignore[import-not-found]  # in a folder of python_paths

        scale = only_on_workers.SCALE
    answers = {
        "num_streamers": dist.num_streamers(),
        "rows": dist.get_streaming_batch_size(batch_size),
        "role": dist.service_resolver().cluster_resolver.task_role.name,
        "local_rank": dist.service_resolver().cluster_spec.task().local_rank,
    }
    name = f"worker_{dist.get_streaming_rank()}" if dist.is_streamer() else "client"
    Path(folder, name).write_text(json.dumps(answers))
    features, labels = samples()
    dataset = TensorDataset(features * scale, labels)
    sampler = cstorch.utils.data.DistributedSampler(dataset, seed=7, batch_size=batch_size)
    return Restartable(dataset, batch_sampler=sampler, collate_fn=collate)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = BATCHES * BATCH_SIZE + 3
    return torch.randn(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def train(
    folder: Path,
    *,
    python_path: Path,
    num_steps: int,
    checkpoint_steps: int | None = None,
    load: Path | None = None,
    more_steps: Sequence[int] = (),
) -> list[float]:
    """Trains on 2 wafers with 2 workers each; writes checkpoint_<step>.mdl, and returns the losses.

    more_steps: of further executions without checkpoints, with an evaluation before each.
    """
    folder.mkdir(exist_ok=True)
    config = cstorch.distributed.ClusterConfig(
        num_csx=2, num_workers_per_csx=2, python_paths=[str(python_path)], mount_dirs=[str(folder)]
    )
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    torch.manual_seed(0)
    model = Network()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = cstorch.utils.data.DataLoader(input_fn, str(folder), batch_size=BATCH_SIZE)
    if load is not None:
        state = cstorch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["input"])

    @cstorch.trace
    def step(batch: dict[str, Any]) -> torch.Tensor:
        (pair,) = batch["pair"]
        assert (batch["name"], batch["nothing"]) == ("random", None)
        loss = F.cross_entropy(compiled(pair.features), pair.labels) * batch["times"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses: list[float] = []

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    @cstorch.checkpoint_closure
    def save_checkpoint(number: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "input": loader.state_dict()}
        cstorch.save(state, folder / f"checkpoint_{number}.mdl")

    executor = cstorch.utils.data.DataExecutor(loader, num_steps=num_steps, checkpoint_steps=checkpoint_steps)
    for batch in executor:
        note(step(batch))
        save_checkpoint(executor.user_iteration)

    @cstorch.trace
    def evaluate(batch: dict[str, Any]) -> torch.Tensor:
        (pair,) = batch["pair"]
        return F.cross_entropy(compiled(pair.features), pair.labels)

    others = cstorch.utils.data.DataLoader(input_fn, str(folder), batch_size=BATCH_SIZE)
    for steps in more_steps:
        model.eval()
        for batch in cstorch.utils.data.DataExecutor(others, num_steps=1):
            evaluate(batch)
        model.train()
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=steps):
            note(step(batch))
    return losses


def plain(num_steps: int, scale: float) -> list[float]:
    """The losses of plain PyTorch on the same batches."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    features, labels = samples()
    losses: list[float] = []
    number = 0
    while len(losses) < num_steps:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7 + number))
        number += 1
        for rows in order[: BATCHES * BATCH_SIZE].split(BATCH_SIZE):
            loss = F.cross_entropy(model(features[rows] * scale), labels[rows]) * 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:num_steps]

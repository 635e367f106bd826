"""What training scripts do around their steps, a function each: `python patterns.py`, or `python patterns.py CPU`.

The numbers that it prints are the same on both backends. docs/patterns.md explains them.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import cerebras.pytorch as cstorch

BATCH = 8


def training_data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(32, 6, generator=generator), torch.arange(32) % 3
    return torch.utils.data.DataLoader(TensorDataset(inputs, labels), BATCH, drop_last=True)


def evaluation_data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(16, 6, generator=generator), torch.arange(16) % 3
    return torch.utils.data.DataLoader(TensorDataset(inputs, labels), BATCH, drop_last=True)


class Averaged(nn.Module):
    """A classifier with a running average of the weights of its last layer, which is state of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("average", torch.zeros(3, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def update_average(self) -> None:
        with torch.no_grad():
            self.average.lerp_(self.layers[2].weight, 0.1)


class Training:
    """A model, its optimizer, and the two steps that the patterns run."""

    def __init__(self, backend: Any) -> None:
        torch.manual_seed(0)
        with backend.device:
            self.model = Averaged()
        self.compiled = cstorch.compile(self.model, backend)
        self.optimizer = cstorch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.schedule = cstorch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, 0.1, total_iters=8)

    def steps(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The step of training, which gives loss and gradient norm, and that of evaluation, which gives the logits."""

        @cstorch.trace
        def training_step(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = F.cross_entropy(self.compiled(inputs), labels)
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.model.update_average()
            return loss, norm

        @cstorch.trace
        @torch.no_grad()
        def evaluation_step(inputs: torch.Tensor) -> torch.Tensor:
            return self.compiled(inputs)

        return training_step, evaluation_step


def executor(input_fn: Callable[[], Any], num_steps: int, **settings: Any) -> Any:
    return cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=num_steps, **settings)


def epochs_with_evaluation(training: Training) -> dict[str, list[float]]:
    """Every epoch is an execution, and so is the evaluation after it. Weights and optimizer go on."""
    training_step, evaluation_step = training.steps()
    losses: list[float] = []
    accuracies: list[float] = []
    correct: list[int] = []

    @cstorch.step_closure
    def note_loss(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    @cstorch.step_closure
    def note_correct(right: torch.Tensor) -> None:
        correct.append(int(right))

    for _ in range(3):
        training.model.train()
        for inputs, labels in executor(training_data, 4):
            loss, _ = training_step(inputs, labels)
            note_loss(loss)
        training.model.eval()
        correct.clear()
        for inputs, labels in executor(evaluation_data, 2):
            logits = evaluation_step(inputs)
            note_correct((logits.argmax(-1) == labels).sum())  # computed when logits and labels are there
        accuracies.append(sum(correct) / 16)
    return {"losses": losses, "accuracies": accuracies}


def best_model(training: Training, folder: Path) -> dict[str, list[float]]:
    """The state is read in a checkpoint closure, which runs after the step closures of its step."""
    training_step, _ = training.steps()
    losses: list[float] = []
    best: dict[str, Any] = {"loss": float("inf"), "weights": {}}

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    @cstorch.checkpoint_closure
    def keep() -> None:
        if losses[-1] < best["loss"]:
            best["loss"] = losses[-1]
            best["weights"] = copy.deepcopy(training.model.state_dict())
            best["path"] = folder / f"best_{len(losses)}.mdl"  # a checkpoint is never overwritten
            cstorch.save({"model": training.model.state_dict()}, best["path"])

    for inputs, labels in executor(training_data, 6, checkpoint_steps=1):
        loss, _ = training_step(inputs, labels)
        note(loss)
        keep()
    torch.save(best["weights"], folder / "best.pt")
    saved = cstorch.load(best["path"])["model"]
    sums = {float(saved[name].sum()) - float(value.sum()) for name, value in torch.load(folder / "best.pt").items()}
    assert sums == {0.0}
    return {"loss": [best["loss"]], "bias": best["weights"]["layers.2.bias"].tolist()}


def early_stopping(training: Training) -> dict[str, list[float]]:
    """An execution has a fixed number of steps; whether another one follows is decided between them."""
    training_step, evaluation_step = training.steps()
    losses: list[float] = []

    @cstorch.step_closure
    def note(logits: torch.Tensor, labels: torch.Tensor) -> None:
        losses.append(F.cross_entropy(logits, labels).item())

    best, patience = float("inf"), 2
    rounds: list[float] = []
    while len(rounds) < 20:
        training.model.train()
        for inputs, labels in executor(training_data, 4):
            training_step(inputs, labels)
        training.model.eval()
        losses.clear()
        for inputs, labels in executor(evaluation_data, 2):
            note(evaluation_step(inputs), labels)
        rounds.append(sum(losses) / len(losses))
        if rounds[-1] < best:
            best, patience = rounds[-1], 2
        else:
            patience -= 1
        if patience == 0:
            break
    assert patience == 0
    return {"rounds": rounds}


def running_averages(training: Training) -> dict[str, list[float]]:
    """Of weights: a buffer that the step updates. Of the loss: in the body of the loop, read after the step."""
    training_step, _ = training.steps()
    average: Any = 0.0
    seen: list[torch.Tensor] = []
    for inputs, labels in executor(training_data, 4):
        loss, _ = training_step(inputs, labels)
        average = 0.9 * average + 0.1 * loss
        seen.append(loss)
    return {
        "average": [average.item()],
        "mean": [torch.stack(seen).mean().item()],
        "weights": training.model.average.cpu().flatten().tolist(),
    }


def gradient_norms(training: Training) -> dict[str, list[float]]:
    """A norm is computed in the step, between the backward pass and the update; the rate is read behind it."""
    training_step, _ = training.steps()
    norms: list[float] = []
    rates: list[float] = []

    @cstorch.step_closure
    def note(norm: torch.Tensor, rate: Any) -> None:
        norms.append(float(norm))
        rates.append(float(rate))

    for inputs, labels in executor(training_data, 4):
        _, norm = training_step(inputs, labels)
        note(norm, training.optimizer.param_groups[0]["lr"])
    return {"norms": norms, "rates": rates}


def main(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"cluster_config": cstorch.distributed.ClusterConfig(num_csx=2)} if kind == "CSX" else {}
        backend = cstorch.backend(kind, artifact_dir=folder / "artifacts", **settings)
        results = {
            "epochs_with_evaluation": epochs_with_evaluation(Training(backend)),
            "best_model": best_model(Training(backend), folder),
            "early_stopping": early_stopping(Training(backend)),
            "running_averages": running_averages(Training(backend)),
            "gradient_norms": gradient_norms(Training(backend)),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "CSX")

"""Trains a three-layer fully connected network on handwritten digits, then evaluates it.

The script is written for a Cerebras wafer-scale cluster and runs on Waferbox as it stands:

    waferbox run --wafers 2 examples/fc_digits/train.py

The digits are the 1,797 real ones that scikit-learn bundles; every fifth is held out for the evaluation.
"""

import argparse
import logging
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

EVAL_BATCH = 72  # five batches hold all 360 held-out digits


def prepare_digits(file: Path) -> None:
    """Writes images (64 features from 0 to 1) and labels to a file that all input workers can read, once."""
    if file.exists():
        return
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"images": torch.tensor(images / 16, dtype=torch.float32), "labels": torch.tensor(labels)}, file)


def digits(file: Path, train: bool) -> TensorDataset:
    """The training or the held-out part."""
    data = torch.load(file)
    held_out = torch.arange(len(data["labels"])) % 5 == 0
    rows = ~held_out if train else held_out
    return TensorDataset(data["images"][rows], data["labels"][rows])


def train_input(file: Path, batch_size: int) -> DataLoader:
    return DataLoader(digits(file, train=True), batch_size=batch_size, shuffle=True, drop_last=True)


def eval_input(file: Path, batch_size: int) -> DataLoader:
    return DataLoader(digits(file, train=False), batch_size=batch_size)


class FullyConnected(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(images)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["CSX", "CPU"], default="CSX")
    parser.add_argument("--num-csx", type=int, default=2, help="wafers to train on")
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint-steps", type=int, default=200)
    parser.add_argument("--data", type=Path, default=Path("data/digits.pt"), help="the digits; made if there is none")
    parser.add_argument(
        "--model-dir",
        type=Path,
        default=Path("model_dir") / time.strftime("%Y-%m-%d_%H-%M-%S"),
        help="takes logs and checkpoints, which are never overwritten",
    )
    parser.add_argument("--load", type=Path, help="a checkpoint to start from")
    parser.add_argument("--summaries", type=Path, help="takes event files, for `tensorboard --logdir`")
    options = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    torch.manual_seed(0)
    prepare_digits(options.data)

    if options.backend == "CSX":
        cluster_config = cstorch.distributed.ClusterConfig(num_csx=options.num_csx)
        backend = cstorch.backend("CSX", artifact_dir=options.model_dir, cluster_config=cluster_config)
    else:
        backend = cstorch.backend("CPU", artifact_dir=options.model_dir)

    with backend.device:
        model = FullyConnected(hidden=256)
    compiled_model = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.01)
    scheduler = cstorch.optim.lr_scheduler.LinearLR(
        optimizer, initial_learning_rate=0.002, end_learning_rate=0.0002, total_iters=options.num_steps
    )
    if options.load is not None:
        state = cstorch.load(options.load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    accuracy = cstorch.metrics.AccuracyMetric("accuracy")
    writer = None if options.summaries is None else cstorch.utils.tensorboard.SummaryWriter(options.summaries)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(compiled_model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor) -> None:
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}")
        progress.step(loss=loss.item())
        if writer is not None:
            writer.add_scalar("loss/train" if model.training else "loss/eval", loss, executor.user_iteration)

    @cstorch.checkpoint_closure
    def save_checkpoint(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        cstorch.save(state, options.model_dir / f"checkpoint_{step}.mdl")

    train_loader = cstorch.utils.data.DataLoader(train_input, options.data.absolute(), options.batch_size)
    executor = cstorch.utils.data.DataExecutor(
        train_loader, num_steps=options.num_steps, checkpoint_steps=options.checkpoint_steps
    )
    with cstorch.utils.progress.Progress("Train", executor, every=50) as progress:
        for batch in executor:
            loss = training_step(batch)
            report(loss)
            save_checkpoint(executor.user_iteration)

    @cstorch.trace
    def eval_step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        logits = compiled_model(images)
        accuracy(labels=labels, predictions=logits.argmax(-1))
        return F.cross_entropy(logits, labels)

    model.eval()
    eval_loader = cstorch.utils.data.DataLoader(eval_input, options.data.absolute(), EVAL_BATCH)
    executor = cstorch.utils.data.DataExecutor(eval_loader)
    with cstorch.utils.progress.Progress("Eval", executor, every=1) as progress, torch.no_grad():
        for batch in executor:
            report(eval_step(batch))

    logging.info("Accuracy on held-out digits: %.4f", float(accuracy))
    if writer is not None:
        writer.add_scalar("accuracy/eval", float(accuracy), options.num_steps)
        writer.close()


if __name__ == "__main__":
    main()

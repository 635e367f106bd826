"""The digits and the network that train.py and eval.py share."""

from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def prepare_digits(file: Path) -> None:
    """Writes images (64 features from 0 to 1) and labels to a file that all input workers can read, once."""
    if file.exists():
        return
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"images": torch.tensor(images / 16, dtype=torch.float32), "labels": torch.tensor(labels)}, file)


def digits(file: Path, train: bool) -> TensorDataset:
    """The training part, or every fifth, which is held out."""
    data = torch.load(file)
    held_out = torch.arange(len(data["labels"])) % 5 == 0
    rows = ~held_out if train else held_out
    return TensorDataset(data["images"][rows], data["labels"][rows])


def train_dataloader_fn(file: Path, batch_size: int) -> DataLoader:
    return DataLoader(digits(file, train=True), batch_size=batch_size, shuffle=True, drop_last=True)


def eval_dataloader_fn(file: Path, batch_size: int) -> DataLoader:
    return DataLoader(digits(file, train=False), batch_size=batch_size)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

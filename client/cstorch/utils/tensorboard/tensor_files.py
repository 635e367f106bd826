"""Tensors beside the event files: <log_dir>/events.out.csevents.<suffix>/tensors/<name>/<step>.<time>.pt."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import torch

from cstorch.errors import ConfigurationError
from waferbox import __version__

_PREFIX = "events.out.csevents."
_METADATA = "metadata.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescriptor:
    """A summarized tensor.

    Args:
        step: The step.
        utctime: The time of the writing.
        tensor: The tensor.
    """

    step: int
    utctime: datetime
    tensor: torch.Tensor


def new_folder(log_dir: Path) -> Path:
    """Returns a folder for one writer, which is not made yet."""
    return log_dir / f"{_PREFIX}{time.time_ns()}.{os.getpid()}"


def make_folder(folder: Path) -> None:
    """Makes the folder of a writer, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _METADATA).write_text(json.dumps({"waferbox": __version__, "tensors": "tensors/<name>/<step>.<ns>.pt"}))


def write(folder: Path, name: str, tensor: torch.Tensor, step: int) -> None:
    """Saves a tensor of a step.

    Raises:
        ConfigurationError: the name leads out of the folder, or the step is negative.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0] == "/":
        raise ConfigurationError(
            f"the name of a summary is a path below its log_dir, such as 'layer/weight', got {name!r}"
        )
    if step < 0:
        raise ConfigurationError(f"the step of a summary must not be negative, got {step}")
    if not folder.exists():
        make_folder(folder)
    target = folder.joinpath("tensors", *parts)
    target.mkdir(parents=True, exist_ok=True)
    torch.save(tensor.detach().cpu().clone(), target / f"{step}.{time.time_ns()}.pt")


def names(log_dir: Path) -> set[str]:
    """Returns the names of all tensors below a folder."""
    return {file.parent.relative_to(root).as_posix() for root in _roots(log_dir) for file in root.rglob("*.pt")}


def read(log_dir: Path, name: str) -> dict[int, list[TensorDescriptor]]:
    """Returns the tensors that were written under a name, by step; the oldest of a step first."""
    files = sorted(
        (int(step), int(written), file)
        for root in _roots(log_dir)
        for file in root.joinpath(name).glob("*.pt")
        for step, written in [file.stem.split(".")]
    )
    found: dict[int, list[TensorDescriptor]] = {}
    for step, written, file in files:
        utctime = datetime.fromtimestamp(written / 1e9, UTC)
        tensor = torch.load(file, weights_only=True)
        found.setdefault(step, []).append(TensorDescriptor(step=step, utctime=utctime, tensor=tensor))
    return found


def _roots(log_dir: Path) -> Iterator[Path]:
    return (folder / "tensors" for folder in sorted(log_dir.rglob(f"{_PREFIX}*")))

"""Saving and loading a checkpoint of a 124M-parameter model with AdamW state, against torch.save and torch.load.

The same tensors on the same disk, in turns, each first in every second round. Both files are on the disk, by fsync,
when a save counts as done; a load counts when every element has been summed. Both are read from the page cache, where
the save has left them.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import cstorch
from benchmarks.show import show_pairs

WIDTH, LAYERS, VOCABULARY, POSITIONS = 768, 12, 50257, 1024
LAYER = (
    [(WIDTH,)] * 4 + [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    + [(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
)  # fmt: skip
SHAPES = [(VOCABULARY, WIDTH), (POSITIONS, WIDTH), *LAYER * LAYERS, (WIDTH,), (WIDTH,)]


def state(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    """A model's tensors and those of its AdamW, random: nothing in them that compresses."""
    return {
        "model": {f"weight{number}": torch.randn(shape) for number, shape in enumerate(shapes)},
        "optimizer": {
            "state": {
                number: {"step": torch.tensor(3.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
                for number, shape in enumerate(shapes)
            },
            "param_groups": [{"lr": 1e-3, "params": list(range(len(shapes)))}],
        },
    }


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def save_torch(saved: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())


def sum_all(tree: Any) -> None:
    for tensor in tensors(tree):
        tensor.sum()


def bench(repeats: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        _measure(state([(2, 2)]), Path(folder))  # what both do only once
        saved = state(SHAPES)
        megabytes = sum(tensor.nbytes for tensor in tensors(saved)) / 1e6
        rounds = [_measure(saved, Path(folder), ours_first=number % 2 == 1) for number in range(2 * repeats)]
    print(
        f"a checkpoint of a 124M-parameter model with AdamW state, {megabytes:.0f} MB, to the disk and from its cache"
    )
    for what in ("save", "load", "load, map_location='cpu'"):
        ours = [megabytes / one[f"cstorch {what}"] for one in rounds]
        theirs = [megabytes / one[f"torch {what.partition(',')[0]}"] for one in rounds]
        show_pairs(f"cstorch.{what}", ours, f"torch.{what.partition(',')[0]}", theirs, "MB/s")


def _measure(saved: Any, folder: Path, *, ours_first: bool = False) -> dict[str, float]:
    """Seconds, by what was done."""
    ours, theirs = folder / "a.mdl", folder / "a.pt"
    work: list[tuple[str, Callable[[], object]]] = [
        ("torch save", lambda: save_torch(saved, theirs)),
        ("cstorch save", lambda: cstorch.save(saved, ours)),
        ("torch load", lambda: sum_all(torch.load(theirs))),
        ("cstorch load", lambda: sum_all(cstorch.load(ours))),
        ("cstorch load, map_location='cpu'", lambda: sum_all(cstorch.load(ours, "cpu"))),
    ]
    if ours_first:
        work = [work[1], work[0], *reversed(work[2:])]
    seconds = {}
    for what, do in work:
        os.sync()  # what others have left to be written is not this one's
        seconds[what] = seconds_of(do)
    ours.unlink()
    theirs.unlink()
    return seconds

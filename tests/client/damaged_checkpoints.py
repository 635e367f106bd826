"""Loads damaged forms of checkpoints: `damaged_checkpoints.py FILE FLIPS CUTS [FILE FLIPS CUTS ...]`.

Prints a line for each: what was done to which file, and "equal", "different", "refused" or what went wrong.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils import _pytree as pytree

from cstorch._internal.checkpoint_files import walk
from cstorch.errors import CheckpointError
from cstorch.storage import load

PAGE = 4096


class WalkForks:
    """subprocess.run for walk.py, without the time that it takes to start Python for each file."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "walk_forks.py"), walk.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command[-2]}\n")
        status, said = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(command, status, said, "")


def damaged(whole: bytes, path: Path, flips: int, cuts: int) -> Iterator[tuple[str, bytes]]:
    for start in range(0, len(whole), PAGE):
        yield (
            f"zeroed page {start // PAGE}",
            whole[:start] + bytes(len(whole[start : start + PAGE])) + whole[start + PAGE :],
        )
    is_data = np.zeros(len(whole), dtype=bool)
    with h5py.File(path) as file:
        for key in file:
            start = file[key].id.get_offset()
            if start is not None:
                is_data[start : start + file[key].id.get_storage_size()] = True
    structure_bytes = np.flatnonzero(~is_data).tolist()
    numbers = random.Random(0)
    for at in numbers.sample(structure_bytes, flips):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << numbers.randrange(8)
        yield f"flipped byte {at}", bytes(flipped)
    for size in numbers.sample(range(len(whole)), cuts):
        yield f"cut to {size}", whole[:size]


def outcome(path: Path, expected: list[Any]) -> str:
    try:
        leaves = pytree.tree_leaves(load(path))
        # Each tensor is read now.
        return "equal" if len(leaves) == len(expected) and all(map(is_equal, leaves, expected)) else "different"
    except CheckpointError as error:
        return "refused" if str(path) in str(error) else f"the file is not named: {error}"
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return f"{type(error).__name__}: {error}"


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(np.array_equal(left, right))


def check(path: Path, flips: int, cuts: int) -> None:
    whole = path.read_bytes()
    expected = pytree.tree_leaves(load(path, "cpu"))
    for number, (what, content) in enumerate(damaged(whole, path, flips, cuts)):
        # Another name each time, so that what HDF5 might keep of a file does not matter.
        other = path.with_name(f"{number}.mdl")
        other.write_bytes(content)
        print(f"{path}: {what}: {outcome(other, expected)}", flush=True)
        other.unlink()


if __name__ == "__main__":
    torch.set_num_threads(1)
    subprocess.run = WalkForks().run  # type: ignore[assignment]  # of this process alone
    for path, flips, cuts in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        check(Path(path), int(flips), int(cuts))

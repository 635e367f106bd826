"""The counter of random numbers in traced steps, a state of every step that draws some.

The numbers of a random operation are a function of the counter and of the operation's index among the random ones of
the step. The counter begins at a hash of torch's seed, and each step adds one. So numbers depend on seed, step and
operation alone; the next execution continues the sequence, and so does one that loads the counter of a checkpoint.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import LazyTensor, cell_of, new_tensor

COUNTER: Final = "state.random.counter"


def first_number(seed: int, restarts: int) -> int:
    """Returns the first number of a counter.

    Args:
        seed: The seed of torch.
        restarts: How often the counter was lost with its cluster.
    """
    # The hashes of two seeds are far apart, so that their sequences never meet; 62 bits leave room for keys above.
    digest = hashlib.blake2b(f"{seed} {restarts}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class RandomCounter:
    """The counter of this process, created at its first use. Used by the script's thread."""

    def __init__(self) -> None:
        self._cell: Cell | None = None
        self._seed = 0
        self._restarts = 0
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the counter does not restart, whatever the seed: its trace will be discarded."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def tensor(self) -> LazyTensor:
        """Returns the counter, int64 of rank 0. It restarts if torch has another seed than at its start."""
        cell = self._cell
        if cell is None:
            cell = self._cell = Cell((), torch.int64)
            self._begin(cell)
        elif self._seed != torch.initial_seed() and not self._is_held:
            self._begin(cell)
        return new_tensor(cell)

    def set(self, value: torch.Tensor) -> None:
        """Continues from an earlier value of the counter: int64 of rank 0."""
        cell_of(self.tensor()).write(value)

    def forget(self) -> None:
        """Restarts a counter that was lost with its cluster, at a number that no step has used."""
        if self._cell is not None and self._cell.remote:
            self._restarts += 1
            self._begin(self._cell)

    def clear(self) -> None:
        """Discards the counter, as in a new process."""
        self._cell = None
        self._restarts = 0

    def _begin(self, cell: Cell) -> None:
        self._seed = torch.initial_seed()
        cell.write(torch.tensor(first_number(self._seed, self._restarts), device="cpu"))


random_counter = RandomCounter()

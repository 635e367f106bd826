"""The counter that random numbers of traced steps come from, loop-carried state of every step that draws some.

The numbers of a random operation are those of a key: the counter, and the place of the operation among those of the
step. The counter begins at a number that is made of torch's seed, and each step adds one to it. So numbers depend on
seed, step and operation alone; the next execution goes on where the last one stopped, and so does one that is given the
counter of a checkpoint.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import LazyTensor, cell_of, new_tensor

COUNTER: Final = "state.random.counter"


class RandomCounter:
    """The counter of this process: made when it is first asked for."""

    def __init__(self) -> None:
        self._cell: Cell | None = None
        self._seed = 0
        self._restarts = 0
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it the counter does not begin anew, whatever the seed: the trace at hand is dropped."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def tensor(self) -> LazyTensor:
        """The counter, int64 of rank 0. It begins anew if torch has another seed than when it began."""
        cell = self._cell
        if cell is None:
            cell = self._cell = Cell((), torch.int64)
            self._begin(cell)
        elif self._seed != torch.initial_seed() and not self._is_held:
            self._begin(cell)
        return new_tensor(cell)

    def set(self, value: torch.Tensor) -> None:
        """Go on from a value that the counter had before: int64 of rank 0."""
        cell_of(self.tensor()).write(value)

    def forget(self) -> None:
        """The cluster is gone that had the counter: go on where no step can have been."""
        if self._cell is not None and self._cell.remote:
            self._restarts += 1
            self._begin(self._cell)

    def clear(self) -> None:
        """Begin anew, as in a new process."""
        self._cell = None
        self._restarts = 0

    def _begin(self, cell: Cell) -> None:
        self._seed = torch.initial_seed()
        # Far from that of any other seed, so that counters never meet; 62 bits leave room for keys above it.
        digest = hashlib.blake2b(f"{self._seed} {self._restarts}".encode(), digest_size=8).digest()
        cell.write(torch.tensor(int.from_bytes(digest, "little") >> 2, device="cpu"))


random_counter = RandomCounter()

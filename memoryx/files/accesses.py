"""What the instructions of a step touch of the file with the states, in order, and in blocks of it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memoryx.files.file_pages import PAGE_BYTES

# A budget is so many blocks: few enough to choose among, enough that it matters little where states begin and end.
BLOCKS: Final = 32
MAX_BLOCK_BYTES: Final = 16 << 20

Extent = tuple[int, int]  # offset and length in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What is touched at one point of the step."""

    read: tuple[Extent, ...] = ()
    written: tuple[Extent, ...] = ()
    lent: bool = False  # others read it after that

    @property
    def extents(self) -> tuple[Extent, ...]:
        return (*self.read, *self.written)


class Blocks:
    """The accesses of a step in blocks, for a budget of memory."""

    def __init__(self, accesses: Sequence[Access], nbytes: int, budget_bytes: int) -> None:
        """nbytes: of the file."""
        self.block_bytes = _block_bytes(budget_bytes)
        self.budget = budget_bytes // self.block_bytes
        self.nbytes = nbytes
        self.lent = [access.lent for access in accesses]
        self.touched = [self.of(access.extents) for access in accesses]
        self.written = [frozenset(self.of(access.written)) for access in accesses]
        self._uses: dict[int, list[int]] = {}  # block -> the accesses that touch it, in order
        for number, blocks in enumerate(self.touched):
            for block in blocks:
                self._uses.setdefault(block, []).append(number)

    def __len__(self) -> int:
        """How many accesses a step has."""
        return len(self.touched)

    @property
    def needed(self) -> int:
        """Blocks that one access touches, at most."""
        return max(map(len, self.touched), default=0)

    def of(self, extents: Sequence[Extent]) -> tuple[int, ...]:
        """The blocks of extents, each once."""
        size = self.block_bytes
        found: dict[int, None] = {}
        for offset, nbytes in extents:
            found |= dict.fromkeys(range(offset // size, -(-(offset + nbytes) // size) if nbytes else 0))
        return tuple(found)

    def extent(self, block: int) -> Extent:
        offset = block * self.block_bytes
        return offset, min(self.block_bytes, self.nbytes - offset)

    def next_use(self, block: int, now: int) -> int:
        """The first access from access `now` on, counted over all steps, that touches the block."""
        steps, position = divmod(now, len(self.touched))
        uses = self._uses[block]
        following = bisect_left(uses, position)
        if following < len(uses):
            return steps * len(self.touched) + uses[following]
        return (steps + 1) * len(self.touched) + uses[0]


def least_budget(accesses: Sequence[Access], nbytes: int) -> int:
    """The least memory with which each access has what it touches there at once."""
    budget = 0
    while True:
        blocks = Blocks(accesses, nbytes, budget)
        if blocks.needed <= blocks.budget:
            return budget
        budget = blocks.needed * blocks.block_bytes


def _block_bytes(budget_bytes: int) -> int:
    """A power of two."""
    pages = max(1, budget_bytes // BLOCKS // PAGE_BYTES)
    return min(MAX_BLOCK_BYTES, PAGE_BYTES << (pages.bit_length() - 1))

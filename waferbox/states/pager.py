"""Which parts of the states are in memory while steps run, where not all may be: those that the schedule uses next."""

import itertools
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from waferbox.host.threads import GuardedThread
from waferbox.links.hub import Stopped
from waferbox.states.file_pages import PAGE_BYTES, FilePages

# --- What the instructions of a step touch of the file with the states, in order, and in blocks of it -----------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Which parts of the states are in memory while steps run, where not all may be: those that the schedule uses next
#
# A step is the same accesses in the same order, again and again. So it is known of each block of the file when it will
# be used next: a thread reads blocks ahead in that order and, when there is no more room, lets those go whose next
# use is
# farthest away, having begun to write them some blocks before.
#
# The pager decides about speed and room alone. Whoever touches a block that is not there gets it from the disk.


READING: Final = 4  # blocks that are being read
WRITING: Final = 4  # blocks that are being written, to make room
RECHECKED_BLOCKS: Final = 4  # blocks that are looked at again for each that goes


class Pager:
    """Keeps the pages of one file within a budget while an execution runs."""

    def __init__(self, pages: FilePages, blocks: Blocks, taken: Callable[[], int]) -> None:
        """
        blocks: of the file, for the budget, which no access exceeds.
        taken: how many of the lent accesses the borrowers have begun to read.
        """
        assert blocks.needed <= blocks.budget
        self._pages = pages
        self._blocks = blocks
        self._taken = taken
        self._resident: dict[int, bool] = {}  # block -> whether it is mapped to be written
        self._writing: deque[int] = deque()  # on their way out; they take room still
        self._coming: deque[tuple[int, int | None]] = deque()  # access, block for it; None: that was all
        self._changed = threading.Condition()
        self._now = -1  # the access that is going on, counted over all steps
        self._ready = 0  # accesses whose blocks are there
        self._borrowed_blocks: deque[tuple[int, tuple[int, ...]]] = deque()
        self._num_lent = 0
        self._maybe_resident: dict[int, None] = {}  # not counted, but perhaps in memory: others had them mapped
        self._closed = False
        self._failure: Exception | None = None
        self._thread: GuardedThread | None = None
        # What the thread has done, and how long it took until pages were there, or were written and gone.
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.evicted_bytes = 0
        self.eviction_seconds = 0.0

    def start(self, num_steps: int) -> None:
        """Begin to read ahead. To be called once."""
        self._pages.evict(0, self._blocks.nbytes)
        self._pages.expect_calls(self._blocks.block_bytes)
        self._thread = GuardedThread(lambda: self._run(num_steps), name="pager", on_defect=self._failed)
        self._thread.start()

    def begin(self, step: int, number: int) -> None:
        """Wait until what an access touches is there. Stopped once the pager is closed; OSError if the disk fails."""
        with self._changed:
            self._now = now = (step - 1) * len(self._blocks) + number
            if self._blocks.lent[number]:
                self._num_lent += 1
                self._borrowed_blocks.append((self._num_lent, self._blocks.touched[number]))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready > now or self._closed or self._failure is not None)
            if self._failure is not None:
                raise OSError(f"states are not read any more: {self._failure}") from self._failure
            if self._closed:
                raise Stopped

    def touched(self, extent: Extent) -> None:
        """Somebody else has read there: what is not wanted in memory goes. From any thread."""
        for block in self._blocks.of([extent]):
            if block not in self._resident:
                self._pages.evict(*self._blocks.extent(block))

    def interrupt(self) -> None:
        """Make begin raise Stopped. From any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and let all pages go."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        self._pages.expect_touches()
        self._pages.evict(0, self._blocks.nbytes)

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # -- in the thread

    def _run(self, num_steps: int) -> None:
        for number in range(num_steps * len(self._blocks)):
            for block in self._blocks.touched[number % len(self._blocks)]:
                while (seen := self._make_room(block, number)) is not None:
                    if not self._wait_beyond(seen):
                        return
                if block not in self._resident:
                    self._pages.read_ahead(*self._blocks.extent(block))
                    self.read_bytes += self._blocks.extent(block)[1]
                    self._resident[block] = False
                    self._coming.append((number, block))
                elif not self._resident[block] and self._is_written(block, number):
                    self._coming.append((number, block))
            self._coming.append((number, None))
            while len(self._coming) > READING or (self._coming and self._coming[0][1] is None):
                self._arrive()
            # Further ahead there is nothing to be read: where all blocks have room, this would run away.
            if not self._wait_beyond(number - len(self._blocks)):
                return
        while self._coming:
            self._arrive()

    def _is_written(self, block: int, number: int) -> bool:
        return block in self._blocks.written[number % len(self._blocks)]

    def _arrive(self) -> None:
        """Wait for what was begun first, and say so when it was the last of an access."""
        number, block = self._coming.popleft()
        if block is None:
            with self._changed:
                self._ready = number + 1
                self._changed.notify_all()
            return
        begin = time.perf_counter()
        writable = self._is_written(block, number)
        self._pages.read(*self._blocks.extent(block), for_writing=writable)
        self._resident[block] = writable
        self.read_seconds += time.perf_counter() - begin

    def _wait_beyond(self, number: int) -> bool:
        """Wait until the steps are beyond an access; whether to go on."""
        while self._coming and self._now <= number:
            self._arrive()  # the steps may wait for just this
        with self._changed:
            self._changed.wait_for(lambda: self._now > number or self._closed)
            return not self._closed

    def _make_room(self, block: int, number: int) -> int | None:
        """Find a place for a block that an access touches. If there is none, the access that the steps were at."""
        if block in self._resident:
            if block in self._writing:
                self._writing.remove(block)  # it stays after all
            return None
        while len(self._resident) >= self._blocks.budget:
            while len(self._writing) < WRITING:
                victim, now = self._victim(number)
                if victim is None:
                    break
                self._pages.start_writing(*self._blocks.extent(victim))
                self._resident[victim] = False
                self._writing.append(victim)
            if not self._writing:
                return now
            self._evict(self._writing.popleft())
        return None

    def _victim(self, number: int) -> tuple[int | None, int]:
        """The block whose next use is farthest away, if that is after access `number`; and the access that is now."""
        with self._changed:
            now = max(self._now, 0)
            lent = self._blocks_lent()
        candidates = self._resident.keys() - self._writing
        # What the borrowers still read goes only where the steps could not go on otherwise.
        for choice in (candidates - lent, candidates & lent if now == number else ()):
            victim = max(choice, key=lambda block: self._blocks.next_use(block, now), default=None)
            if victim is not None and self._blocks.next_use(victim, now) > number:
                return victim, now
        return None, now

    def _blocks_lent(self) -> set[int]:
        """What the borrowers may still read. With the lock."""
        while self._borrowed_blocks and self._borrowed_blocks[0][0] < self._taken():
            self._borrowed_blocks.popleft()
        return {block for _, blocks in self._borrowed_blocks for block in blocks}

    def _evict(self, block: int) -> None:
        begin = time.perf_counter()
        del self._resident[block]
        with self._changed:
            lent = self._blocks_lent()
            again = list(
                itertools.islice((other for other in self._maybe_resident if other not in lent), RECHECKED_BLOCKS)
            )
            for other in again:
                del self._maybe_resident[other]
        for gone in (block, *again):
            if gone not in self._resident and not self._pages.evict(*self._blocks.extent(gone)):
                with self._changed:
                    self._maybe_resident[gone] = None
        self.evicted_bytes += self._blocks.extent(block)[1]
        self.eviction_seconds += time.perf_counter() - begin

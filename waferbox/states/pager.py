"""Paging of the states while steps run, where a memory limit is less than the states: it follows the schedule."""

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

# --- Accesses of a step -----------------------------------------------------------------------------------------------

# A budget is so many blocks: few enough to choose among, and enough that partly used blocks matter little.
BLOCKS: Final = 32
MAX_BLOCK_BYTES: Final = 16 << 20

Extent = tuple[int, int]  # offset and length in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The extents of the states' file that one instruction of a step touches.

    Attributes:
        read: extents that the instruction reads.
        written: extents that it writes.
        lent: whether wafers read the extents after the instruction.
    """

    read: tuple[Extent, ...] = ()
    written: tuple[Extent, ...] = ()
    lent: bool = False

    @property
    def extents(self) -> tuple[Extent, ...]:
        return (*self.read, *self.written)


class Blocks:
    """The accesses of a step in blocks, for a budget of memory."""

    def __init__(self, accesses: Sequence[Access], nbytes: int, budget_bytes: int) -> None:
        """nbytes: the size of the file."""
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
        """The number of accesses of a step."""
        return len(self.touched)

    @property
    def needed(self) -> int:
        """The most blocks that one access touches."""
        return max(map(len, self.touched), default=0)

    def of(self, extents: Sequence[Extent]) -> tuple[int, ...]:
        """Returns the blocks of extents, each once."""
        size = self.block_bytes
        found: dict[int, None] = {}
        for offset, nbytes in extents:
            found |= dict.fromkeys(range(offset // size, -(-(offset + nbytes) // size) if nbytes else 0))
        return tuple(found)

    def extent(self, block: int) -> Extent:
        offset = block * self.block_bytes
        return offset, min(self.block_bytes, self.nbytes - offset)

    def next_use(self, block: int, now: int) -> int:
        """Returns the first access from access `now` on, counted over all steps, that touches the block."""
        steps, position = divmod(now, len(self.touched))
        uses = self._uses[block]
        following = bisect_left(uses, position)
        if following < len(uses):
            return steps * len(self.touched) + uses[following]
        return (steps + 1) * len(self.touched) + uses[0]


def least_budget(accesses: Sequence[Access], nbytes: int) -> int:
    """Returns the least budget, in bytes, in which all blocks of each access have room together."""
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


# --- The pager --------------------------------------------------------------------------------------------------------

READING: Final = 4  # blocks that are being read
WRITING: Final = 4  # blocks that are being written, to make room
RECHECKED_BLOCKS: Final = 4  # blocks whose eviction is tried again for each evicted block


class Pager:
    """Keeps the pages of one file within a budget while an execution runs.

    Every step has the same accesses in the same order, so the next use of each block is known. A thread reads blocks
    ahead in this order. When the budget is used up, it evicts the blocks whose next use is farthest away, and begins to
    write each of them some blocks before. Only speed and memory depend on it: a block that is not in memory is read
    from the disk when it is touched.
    """

    def __init__(self, pages: FilePages, blocks: Blocks, taken: Callable[[], int]) -> None:
        """
        Args:
            pages: the pages of the file.
            blocks: the accesses, none of which exceeds the budget.
            taken: returns the number of lent accesses that the wafers have begun to read.
        """
        assert blocks.needed <= blocks.budget
        self._pages = pages
        self._blocks = blocks
        self._taken = taken
        self._resident: dict[int, bool] = {}  # block -> whether it is mapped to be written
        self._writing: deque[int] = deque()  # blocks that are evicted next, and take room until then
        self._coming: deque[tuple[int, int | None]] = deque()  # access, block for it; None: the access has all blocks
        self._changed = threading.Condition()
        self._now = -1  # the current access, counted over all steps
        self._ready = 0  # accesses whose blocks are in memory
        self._borrowed_blocks: deque[tuple[int, tuple[int, ...]]] = deque()
        self._num_lent = 0
        self._maybe_resident: dict[int, None] = {}  # evicted blocks that another process had mapped
        self._closed = False
        self._failure: Exception | None = None
        self._thread: GuardedThread | None = None
        # The work of the thread, and its waits until blocks were read, or written and evicted.
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.evicted_bytes = 0
        self.eviction_seconds = 0.0

    def start(self, num_steps: int) -> None:
        """Begins to read ahead. Called once."""
        self._pages.evict(0, self._blocks.nbytes)
        self._pages.expect_calls(self._blocks.block_bytes)
        self._thread = GuardedThread(lambda: self._run(num_steps), name="pager", on_defect=self._failed)
        self._thread.start()

    def begin(self, step: int, number: int) -> None:
        """Waits for the blocks of an access. Raises Stopped, once interrupted; OSError: the disk fails."""
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
        """Evicts the blocks of an extent that a client has read, unless steps need them. From any thread."""
        for block in self._blocks.of([extent]):
            if block not in self._resident:
                self._pages.evict(*self._blocks.extent(block))

    def interrupt(self) -> None:
        """Makes `begin` raise Stopped. From any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and evicts all pages."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        self._pages.expect_touches()
        self._pages.evict(0, self._blocks.nbytes)

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # --- In the thread ------------------------------------------------------------------------------------------------

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
            # More than one step ahead there is nothing to read: where all blocks have room, the loop would not wait.
            if not self._wait_beyond(number - len(self._blocks)):
                return
        while self._coming:
            self._arrive()

    def _is_written(self, block: int, number: int) -> bool:
        return block in self._blocks.written[number % len(self._blocks)]

    def _arrive(self) -> None:
        """Waits for the block whose reading was begun first, and counts an access that has all of its blocks."""
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
        """Waits until the steps are beyond an access. Returns whether the pager is still open."""
        while self._coming and self._now <= number:
            self._arrive()  # the steps may wait for this block
        with self._changed:
            self._changed.wait_for(lambda: self._now > number or self._closed)
            return not self._closed

    def _make_room(self, block: int, number: int) -> int | None:
        """Makes room for a block of an access. Returns None, or the current access of the steps if there is no room."""
        if block in self._resident:
            if block in self._writing:
                self._writing.remove(block)  # the block is needed again, and is not evicted
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
        """Returns the block whose next use is farthest away, if it is after access `number`, and the current access."""
        with self._changed:
            now = max(self._now, 0)
            lent = self._blocks_lent()
        candidates = self._resident.keys() - self._writing
        # Blocks that wafers may still read are evicted only where the steps would wait for ever otherwise.
        for choice in (candidates - lent, candidates & lent if now == number else ()):
            victim = max(choice, key=lambda block: self._blocks.next_use(block, now), default=None)
            if victim is not None and self._blocks.next_use(victim, now) > number:
                return victim, now
        return None, now

    def _blocks_lent(self) -> set[int]:
        """Returns the blocks that wafers may still read. Called with the lock."""
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

"""What the pager keeps in memory, on pages that only note what is done with them."""

import random
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from waferbox.links.hub import Stopped
from waferbox.states.file_pages import FilePages
from waferbox.states.pager import BLOCKS, Access, Blocks, Pager, least_budget

PAGE = 4096
BLOCK = 4 * PAGE
NUM_BLOCKS = 40
SECONDS = 20.0


class NotedPages:
    """In place of FilePages."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.resident: set[int] = set()
        self.most = 0
        self.reads: list[int] = []
        self.held: set[int] = set()  # that another process has mapped
        self.failure: Exception | None = None

    def read_ahead(self, offset: int, nbytes: int) -> None:
        with self.lock:
            self.resident.add(offset // BLOCK)
            self.reads.append(offset // BLOCK)
            self.most = max(self.most, len(self.resident - self.held))

    def read(self, offset: int, nbytes: int, *, for_writing: bool) -> None:
        assert offset // BLOCK in self.resident
        if self.failure is not None:
            raise self.failure

    def expect_calls(self, block_bytes: int) -> None:
        assert block_bytes == BLOCK

    def expect_touches(self) -> None: ...

    def start_writing(self, offset: int, nbytes: int) -> None:
        assert offset // BLOCK in self.resident

    def evict(self, offset: int, nbytes: int) -> bool:
        with self.lock:
            blocks = set(range(offset // BLOCK, -(-(offset + nbytes) // BLOCK)))
            self.resident -= blocks - self.held
            return not blocks & self.held


def access(*blocks: int, written: tuple[int, ...] = (), lent: bool = False) -> Access:
    return Access(
        read=tuple((block * BLOCK, BLOCK) for block in blocks),
        written=tuple((block * BLOCK, BLOCK) for block in written),
        lent=lent,
    )


class Rig:
    def __init__(self, accesses: list[Access], budget: int) -> None:
        """budget: in blocks."""
        self.accesses = accesses
        self.pages = NotedPages()
        self.taken = 10**9
        self.pager = Pager(cast(FilePages, self.pages), in_blocks(accesses, budget), lambda: self.taken)

    def run(self, steps: int) -> None:
        self.pager.start(steps)
        for step in range(1, steps + 1):
            for number, one in enumerate(self.accesses):
                self.pager.begin(step, number)
                with self.pages.lock:
                    wanted = {offset // BLOCK for offset, _ in one.extents}
                    assert wanted <= self.pages.resident, (step, number)


def in_blocks(accesses: list[Access], budget: int) -> Blocks:
    """Blocks of BLOCK bytes, and so many of them as a budget."""
    made = Blocks(accesses, NUM_BLOCKS * BLOCK, BLOCKS * BLOCK)
    assert made.block_bytes == BLOCK
    made.budget = budget
    return made


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.pager.close()


def in_time(rig: Rig, steps: int) -> None:
    """Runs the steps in a thread, so that a deadlock is a failure."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            rig.run(steps)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_touched_is_there_and_never_more_than_the_budget(seed: int, rigs: list[Rig]) -> None:
    draw = random.Random(seed)
    accesses = []
    for _ in range(draw.randint(1, 30)):
        blocks = draw.sample(range(NUM_BLOCKS), draw.randint(0, 6))
        cut = draw.randint(0, len(blocks))
        accesses.append(access(*blocks[:cut], written=tuple(blocks[cut:]), lent=draw.random() < 0.3))
    needed = max(len(one.extents) for one in accesses)
    rig = Rig(accesses, draw.randint(max(1, needed), 20))
    rigs.append(rig)
    rig.taken = draw.choice([0, 10**9])  # borrowers that never say that they have read, or at once
    in_time(rig, 8)
    assert rig.pages.most <= rig.pager._blocks.budget


def test_what_fits_is_read_once(rigs: list[Rig]) -> None:
    rig = Rig([access(*range(k, k + 4)) for k in range(0, 20, 4)], 20)
    rigs.append(rig)
    in_time(rig, 50)
    assert sorted(rig.pages.reads) == list(range(20))


def test_what_is_used_last_stays(rigs: list[Rig]) -> None:
    """Of a scan over and over, a cache that lets the oldest go would find nothing; a part is to stay."""
    rig = Rig([access(block) for block in range(20)], 12)
    rigs.append(rig)
    in_time(rig, 20)
    # All blocks but those in flight would be 20 - 12 a step; without knowing what comes it would be 20.
    assert len(rig.pages.reads) <= 20 + 19 * 14


def test_it_reads_no_further_ahead_than_a_step(rigs: list[Rig]) -> None:
    rig = Rig([access(0), access(1)], 8)
    rigs.append(rig)
    rig.pager.start(10**9)  # it would run for long
    rig.pager.begin(1, 0)
    rig.pager.begin(1, 1)
    rig.pager.begin(2, 0)
    with rig.pager._changed:
        assert rig.pager._ready <= 5


def test_blocks_that_are_being_read_by_others_go_last(rigs: list[Rig]) -> None:
    rig = Rig([access(0, lent=True), access(1), access(2), access(3), access(4), access(5), access(6), access(7)], 6)
    rigs.append(rig)
    rig.taken = 0
    rig.pager.start(1)
    for number in range(7):
        rig.pager.begin(1, number)
    assert 0 in rig.pages.resident
    rig.taken = 2
    rig.pager.begin(1, 7)


def test_blocks_that_others_had_mapped_go_later(rigs: list[Rig]) -> None:
    rig = Rig([access(block) for block in range(12)], 6)
    rigs.append(rig)
    rig.pages.held = {0, 1}
    in_time(rig, 2)
    rig.pages.held = set()
    rig.pager.touched((11 * BLOCK, 1))
    rig.pager.close()
    assert not rig.pages.resident


def test_an_interrupt_ends_the_wait(rigs: list[Rig]) -> None:
    rig = Rig([access(0)], 4)
    rigs.append(rig)
    rig.pager.interrupt()
    with pytest.raises(Stopped):
        rig.pager.begin(1, 0)


@pytest.mark.defects
def test_a_disk_that_fails_is_an_error(rigs: list[Rig]) -> None:
    rig = Rig([access(0)], 4)
    rigs.append(rig)
    rig.pages.failure = OSError(5, "Input/output error")
    rig.pager.start(3)
    with pytest.raises(OSError, match="Input/output error"):
        rig.pager.begin(1, 0)


def test_the_least_budget_is_enough_and_less_is_not() -> None:
    accesses = [Access(read=((5, 3_000_000),), written=((4_000_000, 700_001),)), Access(read=((0, 10),))]
    least = least_budget(accesses, 8_000_000)
    assert 3_700_000 < least < 5_000_000
    enough, less = Blocks(accesses, 8_000_000, least), Blocks(accesses, 8_000_000, int(least * 0.7))
    assert enough.needed <= enough.budget
    assert less.needed > less.budget

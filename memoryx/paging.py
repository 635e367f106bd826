"""A program's use of states that are not all in memory: tells a pager what each instruction touches."""

import logging
import time
from collections.abc import Iterable
from typing import Final

import torch

from waferbox.links.elements import tensor_bytes
from waferbox.links.link import Link
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.program import Program
from waferbox.runtime.progress import resident_bytes
from waferbox.states.pager import Access, Blocks, Extent, Pager, least_budget
from waferbox.states.state_memory import TRANSFER_BYTES
from waferbox.states.store import StateStore
from wsc.v1 import node_pb2, plan_pb2

logger = logging.getLogger(__name__)

# An update is done in parts that are no larger than this share of the budget: there is room to read ahead beside it.
_SHARE: Final = 4
_MAX_PARTS: Final = 256


class Paging:
    """Nothing of this costs anything where states are in memory, or where no limit is set."""

    def __init__(self, plan: plan_pb2.MemoryXPlan, store: StateStore, program: Program, swarmx: Link) -> None:
        self._store = store
        self._program = program
        self._swarmx = swarmx
        self._accesses: list[Access] = []
        self._pager: Pager | None = None
        limit, pages = store.settings.limit_bytes, store.states.pages
        self._is_limited = limit is not None and pages is not None
        self._base = store.memory.tensor(torch.uint8, (1,), 0).data_ptr()
        self._others = 0  # bytes that are not states, once the program runs
        self._budget = 0
        if limit is not None and pages is not None:
            pages.evict(0, store.memory.nbytes)
            received = plan.arena.nbytes if swarmx.lane == "grpc" else 0
            states = sum(tensor_bytes(slot.type) for slot in plan.states)
            self._others = resident_bytes() + max(0, plan.own_bytes - states) + received + TRANSFER_BYTES
            self._budget = max(0, limit - self._others)
            logger.info(
                "room for %.0f of %.0f MB of weights and optimizer state in memory: the process has %.0f MB",
                self._budget / 1e6,
                store.memory.nbytes / 1e6,
                self._others / 1e6,
            )

    def parts(self, tensors: Iterable[torch.Tensor]) -> int:
        """In how many parts an instruction that touches these states is best done, where it can be."""
        if not self._is_limited:
            return 1
        nbytes = sum(nbytes for _, nbytes in self._extents(tensors))
        return max(1, min(_MAX_PARTS, -(-nbytes * _SHARE // max(1, self._budget))))

    def add(
        self,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor] = (),
        *,
        lent: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """The program's next instruction touches these tensors, as far as they are states.

        lent: the wafers read them where they lie. part: number and count; the instruction touches that part of each.
        """
        if not self._is_limited:
            return
        number = len(self._accesses)
        self._accesses.append(
            Access(
                read=tuple(_part(extent, *part) for extent in self._extents(read)),
                written=tuple(_part(extent, *part) for extent in self._extents(written)),
                lent=lent,
            )
        )
        progress, now = self._program.progress, time.perf_counter

        def begin(step: int) -> None:
            assert self._pager is not None, "it is started"
            start = now()
            self._pager.begin(step, number)
            progress.disk += now() - start

        self._program.add(begin, "states", what="disk")

    def prepare(self) -> None:
        """All instructions are there. JobFailure where the limit is too small for one of them."""
        pages = self._store.states.pages
        if not self._is_limited or not self._accesses or pages is None:
            return
        nbytes = self._store.memory.nbytes
        blocks = Blocks(self._accesses, nbytes, self._budget)
        if blocks.needed > blocks.budget:
            least = least_budget(self._accesses, nbytes)
            limit = self._store.settings.limit_bytes or 0
            raise JobFailure(
                node_pb2.Failure.KIND_USER,
                f"with --memory-limit {limit >> 20}m MemoryX has room for {self._budget / 1e6:.0f} MB of weights and "
                f"optimizer state, as the process itself takes {self._others / 1e6:.0f} MB; the largest group of "
                f"weights, or update, needs {least / 1e6:.0f} MB at once. The limit must be at least "
                f"{-(-(self._others + least) >> 20)}m",
            )
        self._pager = Pager(pages, blocks, lambda: self._swarmx.granted)

    def start(self, num_steps: int) -> None:
        """The program is about to run."""
        if self._pager is not None:
            self._store.pager = self._pager
            self._pager.start(num_steps)

    def interrupt(self) -> None:
        """Make the program's waits for the disk raise Stopped. From any thread."""
        if self._pager is not None:
            self._pager.interrupt()

    def close(self) -> None:
        """The program does not run any more."""
        self._store.pager = None
        pager = self._pager
        if pager is not None:
            pager.close()
            logger.info(
                "states were read from the disk: %.2f GB in %.1f s; and written there and let go: %.2f GB in %.1f s",
                pager.read_bytes / 1e9,
                pager.read_seconds,
                pager.evicted_bytes / 1e9,
                pager.eviction_seconds,
            )

    def _extents(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        extents = ((tensor.data_ptr() - self._base, tensor.nbytes) for tensor in tensors)
        return [(offset, nbytes) for offset, nbytes in extents if nbytes and 0 <= offset < self._store.memory.nbytes]


def _part(extent: Extent, number: int, count: int) -> Extent:
    offset, nbytes = extent
    first, end = nbytes * number // count, -(-nbytes * (number + 1) // count)
    return offset + first, end - first

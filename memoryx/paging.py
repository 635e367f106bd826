"""The paging of a program whose states do not all fit into memory: the extents that each instruction touches."""

import logging
import time
from collections.abc import Iterable
from typing import Final

import torch

from waferbox.links.elements import tensor_bytes
from waferbox.links.link import Link
from waferbox.runtime.loops import in_order, position_in_step
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.program import Program
from waferbox.runtime.progress import resident_bytes
from waferbox.states.pager import Access, Blocks, Extent, Pager, least_budget
from waferbox.states.state_memory import TRANSFER_BYTES
from waferbox.states.store import StateStore
from wsc.v1 import node_pb2, plan_pb2

logger = logging.getLogger(__name__)

# An update is done in parts of at most 1 / _SHARE of the budget, so that states can be read ahead beside it.
_SHARE: Final = 4
_MAX_PARTS: Final = 256


class Paging:
    """The accesses of a program to its states, and the pager that serves them. No cost where no limit is set.

    Used by the thread of the steps, `interrupt` aside.
    """

    def __init__(self, plan: plan_pb2.MemoryXPlan, store: StateStore, program: Program, swarmx: Link) -> None:
        self._store = store
        self._program = program
        self._swarmx = swarmx
        self._accesses: list[Access] = []
        self._loop = plan_pb2.Loop()  # of the accesses
        self._pager: Pager | None = None
        limit, pages = store.settings.limit_bytes, store.states.pages
        self._is_limited = limit is not None and pages is not None
        self._base = store.memory.tensor(torch.uint8, (1,), 0).data_ptr()
        self._others = 0  # bytes of the running process that are not states
        self._budget = 0
        if limit is not None and pages is not None:
            pages.evict(0, store.memory.nbytes)
            received = plan.arena.nbytes if swarmx.lane == "grpc" else 0
            states = sum(tensor_bytes(slot.type) for slot in plan.states)
            self._others = resident_bytes() + max(0, plan.own_bytes - states) + received + TRANSFER_BYTES
            self._budget = max(0, limit - self._others)
            logger.info(
                "Room for %.0f of %.0f MB of weights and optimizer state in memory: the process has %.0f MB",
                self._budget / 1e6,
                store.memory.nbytes / 1e6,
                self._others / 1e6,
            )

    def parts(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the number of parts in which a run that touches these states should be done, if it can be parted."""
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
        """Adds an action that waits for the states of the program's next instruction. Other tensors are ignored.

        Args:
            read: the tensors that it reads.
            written: the tensors that it writes.
            lent: whether wafers read the tensors in place.
            part: (number, count); the instruction touches this part of each tensor.
        """
        if not self._is_limited:
            return
        position = len(self._accesses)
        self._accesses.append(
            Access(
                read=tuple(_part(extent, *part) for extent in self._extents(read)),
                written=tuple(_part(extent, *part) for extent in self._extents(written)),
                lent=lent,
            )
        )
        program, loop, progress, now = self._program, self._loop, self._program.progress, time.perf_counter

        def begin(step: int) -> None:
            assert self._pager is not None, "`start` sets it"
            start = now()
            number = position_in_step(position, loop) + program.repetition * (loop.end - loop.begin)
            self._pager.begin(step, number)
            progress.disk += now() - start

        self._program.add(begin, "states", what="disk")

    def begin_loop(self, times: int) -> None:
        """Begins the program's loop: accesses that are added from now on are made so many times in a step."""
        self._loop.begin, self._loop.times = len(self._accesses), times

    def end_loop(self) -> None:
        """Ends the loop."""
        self._loop.end = len(self._accesses)

    def prepare(self) -> None:
        """Makes the pager, after the last `add`. Raises JobFailure if the limit is too small for an instruction."""
        pages = self._store.states.pages
        if not self._is_limited or not self._accesses or pages is None:
            return
        nbytes = self._store.memory.nbytes
        accesses = [access for access, _ in in_order(self._accesses, self._loop)]
        blocks = Blocks(accesses, nbytes, self._budget)
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
        """Starts the pager; called before the first step."""
        if self._pager is not None:
            self._store.pager = self._pager
            self._pager.start(num_steps)

    def interrupt(self) -> None:
        """Makes the program's waits for the disk raise Stopped. From any thread."""
        if self._pager is not None:
            self._pager.interrupt()

    def close(self) -> None:
        """Closes the pager; called after the last step."""
        self._store.pager = None
        pager = self._pager
        if pager is not None:
            pager.close()
            logger.info(
                "Read %.2f GB of states from the disk in %.1f s; wrote and dropped %.2f GB in %.1f s",
                pager.read_bytes / 1e9,
                pager.read_seconds,
                pager.evicted_bytes / 1e9,
                pager.eviction_seconds,
            )

    def _extents(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        """Returns the extents of those tensors that lie in the memory of the states."""
        extents = ((tensor.data_ptr() - self._base, tensor.nbytes) for tensor in tensors)
        return [(offset, nbytes) for offset, nbytes in extents if nbytes and 0 <= offset < self._store.memory.nbytes]


def _part(extent: Extent, number: int, count: int) -> Extent:
    offset, nbytes = extent
    first, end = nbytes * number // count, -(-nbytes * (number + 1) // count)
    return offset + first, end - first

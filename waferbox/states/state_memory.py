"""The memory of the states of a job: shared memory or, where the states may exceed it, a file."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from waferbox.host.threads import GuardedThread
from waferbox.links.shared_memory import SharedMemory
from waferbox.runtime.node_job import JobFailure
from waferbox.states.file_pages import FilePages, discard_pages
from waferbox.states.pager import Extent
from wsc.v1 import node_pb2

CHUNK_BYTES: Final = 4 << 20  # copied at a time
TRANSFER_BYTES: Final = 16 << 20  # the most of a file in memory while all of it is read or written
TRIM_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The settings of a process that keeps states.

    Attributes:
        folder: the folder of the files with the states; None: they are in shared memory.
        limit_bytes: the most memory that the process uses, states included; None: no limit but that of the host.
    """

    folder: Path | None = None
    limit_bytes: int | None = None


class StateMemory:
    """A piece of memory for states, all zero at first. Not thread-safe: the users of the memory keep threads apart."""

    def __init__(self, nbytes: int, settings: StateSettings, purpose: str) -> None:
        """Raises JobFailure, with a message that names the purpose: the disk has no room."""
        self.memory = _create(nbytes, settings.folder, purpose)
        self.pages = FilePages(self.memory) if self.memory.in_file else None

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def evict(self, extent: Extent) -> None:
        """Evicts an extent from memory, if it is in a file."""
        if self.pages is not None and extent[1]:
            self.pages.evict(*extent)

    @contextmanager
    def passing(self, extent: Extent) -> Iterator[None]:
        """Evicts an extent behind a caller that reads or writes it from its start to its end, if it is in a file."""
        pages = self.pages
        if pages is None or not extent[1]:
            yield
            return
        ended = threading.Event()
        defects: list[Exception] = []

        def trim() -> None:
            while not ended.wait(TRIM_SECONDS):
                if pages.resident_bytes(*extent) > TRANSFER_BYTES // 2:
                    pages.evict(*extent)

        thread = GuardedThread(trim, name="write-behind", on_defect=defects.append)
        if extent[1] > TRANSFER_BYTES:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            pages.evict(*extent)
        if defects:
            raise defects[0]

    def copy_from(self, source: "StateMemory", source_offset: int, offset: int, nbytes: int) -> None:
        """Copies bytes from other memory, with at most a few chunks of files in memory meanwhile."""
        for done in range(0, nbytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, nbytes - done)
            if source.pages is not None:
                source.pages.read_ahead(source_offset + done, length)
                source.pages.read(source_offset + done, length, for_writing=False)
            if self.pages is None:
                target = self.memory.tensor(torch.uint8, (length,), offset + done)
                target.copy_(source.memory.tensor(torch.uint8, (length,), source_offset + done))
                continue
            # A system call does not read the pages that it writes as a whole; a write by the mapping would.
            written = os.pwrite(self.memory.fileno(), source.memory.view(source_offset + done, length), offset + done)
            if written != length:
                raise OSError(f"the disk has taken {written} of {length} bytes of the states")
            self.pages.start_writing(offset + done, length)
            if done:
                self.pages.evict(offset + done - CHUNK_BYTES, CHUNK_BYTES)
        if nbytes and self.pages is not None:
            self.evict((offset + (nbytes - 1) // CHUNK_BYTES * CHUNK_BYTES, (nbytes - 1) % CHUNK_BYTES + 1))

    def discard(self, extent: Extent) -> None:
        """Frees the memory and the disk space of an extent, which is not read again."""
        discard_pages(self.memory, *extent)

    def close(self) -> None:
        """Frees the memory, which nothing uses any more."""
        self.memory.close()


def _create(nbytes: int, folder: Path | None, purpose: str) -> SharedMemory:
    if folder is None:
        return SharedMemory.create(nbytes)
    try:
        return SharedMemory.create_in(folder, nbytes)
    except OSError as error:
        if error.errno == errno.EFBIG:  # a limit of this process; room on the disk does not help
            raise
        disk = os.statvfs(folder)
        raise JobFailure(
            node_pb2.Failure.KIND_USER,
            f"MemoryX needs {nbytes / 1e9:.3g} GB in {folder} for {purpose}, where "
            f"{disk.f_bavail * disk.f_frsize / 1e9:.3g} GB are free ({error.strerror}): make room there, or start "
            f"MemoryX with a --state-dir on another disk, or more shards of MemoryX, which share the states",
        ) from error

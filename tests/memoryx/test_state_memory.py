"""States in files: what of them is in memory, how they are copied, and what is said where there is no room."""

import os
from pathlib import Path

import pytest
import torch

from waferbox.links.shared_memory import SharedMemory
from waferbox.runtime.node_job import JobFailure
from waferbox.states import state_memory
from waferbox.states.file_pages import LARGE_PAGE_BYTES
from waferbox.states.state_memory import CHUNK_BYTES, TRANSFER_BYTES, StateMemory, StateSettings
from wsc.v1 import node_pb2

NBYTES = 12 * CHUNK_BYTES + 4096


def make(folder: Path | None) -> StateMemory:
    return StateMemory(NBYTES, StateSettings(folder=folder), "states")


def values(memory: StateMemory) -> torch.Tensor:
    return memory.memory.tensor(torch.int32, (NBYTES // 4,), 0)


def resident(memory: StateMemory) -> int:
    assert memory.pages is not None
    return memory.pages.resident_bytes(0, NBYTES)


def test_pages_come_and_go(tmp_path: Path) -> None:
    memory = make(tmp_path)
    pages = memory.pages
    assert pages is not None
    values(memory).fill_(3)
    assert resident(memory) == NBYTES
    assert pages.evict(0, NBYTES)
    assert resident(memory) == 0
    pages.read_ahead(0, 8192)
    pages.read(0, 8192, for_writing=False)
    assert resident(memory) >= 8192
    pages.read(4096, 5, for_writing=True)
    assert (values(memory) == 3).all()
    memory.close()


@pytest.mark.parametrize("block_bytes", [4096, LARGE_PAGE_BYTES])
def test_what_is_read_by_calls_is_what_was_asked_for(tmp_path: Path, block_bytes: int) -> None:
    """And all of it can go again, whatever pages the kernel has made for it."""
    memory = make(tmp_path)
    pages = memory.pages
    assert pages is not None
    values(memory).copy_(torch.arange(NBYTES // 4, dtype=torch.int32))
    pages.evict(0, NBYTES)
    pages.expect_calls(block_bytes)
    for block in (3, 0, 7):
        offset = block * block_bytes
        pages.read_ahead(offset, block_bytes)
        pages.read(offset, block_bytes, for_writing=block == 3)
        assert pages.resident_bytes(offset, block_bytes) == block_bytes
        assert resident(memory) == block_bytes
        values(memory)[offset // 4] = -block
        pages.start_writing(offset, block_bytes)
        assert pages.evict(offset, block_bytes)
    pages.expect_touches()
    for block in (3, 0, 7):
        assert values(memory)[block * block_bytes // 4] == -block
        assert values(memory)[block * block_bytes // 4 + 1] == block * block_bytes // 4 + 1
    memory.close()


def test_pages_that_somebody_else_has_mapped_stay_until_he_has_done(tmp_path: Path) -> None:
    memory = make(tmp_path)
    assert memory.pages is not None
    values(memory).fill_(3)
    peer = SharedMemory.from_fd(os.dup(memory.memory.fileno()), NBYTES)
    view = peer.view(8192, 4096)
    assert view[0] == 3
    assert not memory.pages.evict(0, NBYTES)
    assert 4096 <= resident(memory) < NBYTES
    del view
    assert memory.pages.evict(0, NBYTES)
    peer.close()
    memory.close()


@pytest.mark.parametrize("target_in_file", [False, True])
def test_copies_of_files_do_not_stay_in_memory(tmp_path: Path, target_in_file: bool) -> None:
    source, target = make(tmp_path), make(tmp_path if target_in_file else None)
    values(source).copy_(torch.arange(NBYTES // 4, dtype=torch.int32))
    source.evict((0, NBYTES))
    target.copy_from(source, 4096, 0, NBYTES - 4096)
    if target_in_file:
        assert resident(target) <= CHUNK_BYTES  # the kernel reads ahead of those who touch
    assert torch.equal(values(target)[: NBYTES // 4 - 1024], values(source)[1024:])
    source.close()
    target.close()


def test_what_is_written_from_one_end_to_the_other_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_memory, "TRIM_SECONDS", 0.001)
    memory = make(tmp_path)
    most = 0
    with memory.passing((0, NBYTES)):
        while not most:  # until it was trimmed once
            values(memory).fill_(5)
            most = max(0, NBYTES - resident(memory))
    assert resident(memory) == 0
    assert NBYTES > TRANSFER_BYTES
    assert (values(memory) == 5).all()
    memory.close()


@pytest.mark.parametrize("in_file", [False, True])
def test_what_is_discarded_takes_no_room(tmp_path: Path, in_file: bool) -> None:
    memory = make(tmp_path if in_file else None)
    values(memory).fill_(1)
    before = os.fstat(memory.memory.fileno()).st_blocks
    memory.discard((100, CHUNK_BYTES))
    gone = before - os.fstat(memory.memory.fileno()).st_blocks
    assert CHUNK_BYTES - 2 * 4096 <= gone * 512 <= CHUNK_BYTES
    assert (values(memory)[:25] == 1).all()
    assert (values(memory)[(100 + CHUNK_BYTES) // 4 :] == 1).all()
    memory.close()


def test_a_full_disk_is_an_error_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        JobFailure, match=r"needs 0\.05\d+ GB in .* for states, where .* GB are free .*--state-dir"
    ) as error:
        make(tmp_path)
    assert error.value.kind == node_pb2.Failure.KIND_USER

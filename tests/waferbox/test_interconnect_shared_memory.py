import os
from pathlib import Path

import pytest
import torch

from waferbox.links.shared_memory import SharedMemory


def test_two_mappings_share_the_bytes() -> None:
    memory = SharedMemory.create(4096)
    other = SharedMemory.from_fd(os.dup(memory.fileno()), 4096)
    memory.tensor(torch.float32, (2, 3), 64).copy_(torch.arange(6.0).view(2, 3))
    assert other.tensor(torch.float32, (6,), 64).tolist() == [0, 1, 2, 3, 4, 5]
    memory.close()
    other.close()


def test_a_tensor_outlives_the_segment() -> None:
    memory = SharedMemory.create(4096)
    tensor = memory.tensor(torch.int64, (4,), 0)
    tensor.fill_(7)
    memory.close()
    memory.close()
    assert memory.closed
    assert tensor.tolist() == [7, 7, 7, 7]


def test_empty_tensors_have_a_shape() -> None:
    memory = SharedMemory.create(64)
    assert memory.tensor(torch.bool, (0, 5), 64).shape == (0, 5)
    memory.close()


def test_memory_that_its_owner_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        SharedMemory.from_fd(descriptor, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_size_beyond_the_memory_is_refused() -> None:
    memory = SharedMemory.create(4096)
    with pytest.raises(ValueError, match="4096 bytes, not 8192"):
        SharedMemory.from_fd(os.dup(memory.fileno()), 8192)
    memory.close()


def test_the_owner_cannot_shrink_it() -> None:
    memory = SharedMemory.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 1)
    memory.close()


def test_a_file_is_shared_without_a_name(tmp_path: Path) -> None:
    memory = SharedMemory.create_in(tmp_path, 3 * 4096 + 5)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(memory.fileno()).st_blocks * 512 >= 3 * 4096 + 5  # there is room for all of it
    other = SharedMemory.from_fd(os.dup(memory.fileno()), memory.nbytes)
    memory.tensor(torch.float32, (2000,), 4100).copy_(torch.arange(2000.0))
    view = other.view(4100, 8000)
    assert torch.equal(torch.frombuffer(view, dtype=torch.float32), torch.arange(2000.0))
    assert view.readonly
    assert len(other.view(0, 0)) == 0
    memory.tensor(torch.float32, (2000,), 4100).fill_(7)
    memory.close()
    other.close()
    assert set(view.cast("f").tolist()) == {7.0}


def test_a_file_is_mapped_for_as_long_as_it_is_viewed(tmp_path: Path) -> None:
    def mapped() -> int:
        return sum(f"{tmp_path}/" in line for line in Path("/proc/self/maps").read_text().splitlines())

    memory = SharedMemory.create_in(tmp_path, 1 << 20)
    other = SharedMemory.from_fd(os.dup(memory.fileno()), memory.nbytes)
    assert mapped() == 1
    tensor = torch.frombuffer(other.view(8192, 64), dtype=torch.float32)
    part = tensor[3:5]
    assert mapped() == 2
    del tensor
    assert mapped() == 2
    del part
    assert mapped() == 1
    memory.close()
    other.close()


def test_a_file_that_others_could_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="has a name"):
        SharedMemory.from_fd(os.open(path, os.O_RDWR), 4096)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    memory = SharedMemory.create_in(tmp_path, 4096)
    os.fchown(memory.fileno(), 12345, -1)
    with pytest.raises(ValueError, match="another user"):
        SharedMemory.from_fd(os.dup(memory.fileno()), 4096)
    memory.close()


def test_a_folder_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="not on a disk"):
        SharedMemory.create_in(Path("/dev/shm"), 4096)

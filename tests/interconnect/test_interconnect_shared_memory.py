import os

import pytest
import torch

from interconnect.links.shared_memory import SharedMemory


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

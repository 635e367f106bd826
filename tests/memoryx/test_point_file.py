"""The file of a recovery point is read as it was written, or refused with its name."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waferbox.states import point_file
from waferbox.states.layout import StateExtent
from waferbox.states.point_file import DamagedPoint, PointFile, PointWriter, copy_point
from wsc.v1 import plan_pb2

OWNER = "memoryx-0 of job-1"
VALUES = {
    "large": torch.arange(3000, dtype=torch.float32).reshape(3, 1000),
    "half, and a name that is not ASCII: µ": torch.linspace(-3, 3, 77).to(torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False, True]),
}
ELEMENTS = {
    torch.float32: plan_pb2.ELEMENT_TYPE_FLOAT32,
    torch.bfloat16: plan_pb2.ELEMENT_TYPE_BFLOAT16,
    torch.int64: plan_pb2.ELEMENT_TYPE_INT64,
    torch.bool: plan_pb2.ELEMENT_TYPE_BOOL,
}


def places_of(values: Mapping[str, torch.Tensor]) -> dict[str, StateExtent]:
    return {
        name: StateExtent.at(1 << 20, plan_pb2.TensorType(element_type=ELEMENTS[value.dtype], shape=value.shape))
        for name, value in values.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else tensor.numpy().tobytes())


def write(folder: Path, number: int = 1, *, stays_in_memory: bool = True) -> PointWriter:
    """In pieces, those of the states in turns, as they come where states are written while they are saved."""
    file = PointWriter(folder, number, places_of(VALUES), OWNER, stays_in_memory=stays_in_memory)
    for offset in range(0, 12_000, 500):
        for name, value in VALUES.items():
            part = bytes_of(value)[offset : offset + 500]
            if part:
                file.write(name, offset, memoryview(part))
    return file


def read(path: Path, owner: str = OWNER) -> dict[str, bytes]:
    file = PointFile(path, owner)
    try:
        found = {}
        for name, place in file.extents.items():
            target = bytearray(place.nbytes)
            file.read(name, memoryview(target))
            found[name] = bytes(target)
        return found
    finally:
        file.close()


@pytest.mark.parametrize("stays_in_memory", [True, False])
def test_states_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays_in_memory: bool
) -> None:
    monkeypatch.setattr(point_file, "READ_BYTES", 700)
    file = write(tmp_path, stays_in_memory=stays_in_memory)
    assert not file.path.exists()
    file.complete()
    file.discard()
    assert os.listdir(tmp_path) == ["1"]
    assert read(file.path) == {name: bytes_of(value) for name, value in VALUES.items()}
    opened = PointFile(file.path, OWNER)
    for name, place in places_of(VALUES).items():
        assert opened.extents[name].is_like(place)
    assert opened.nbytes == file.nbytes == sum(value.nbytes for value in VALUES.values())
    opened.close()


def test_an_unfinished_file_has_no_name_and_leaves_nothing(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.discard()
    file.discard()
    assert not os.listdir(tmp_path)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("points")
    write(folder).complete()
    return (folder / "1").read_bytes()


COMMON = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_refused(folder: Path, content: bytes) -> None:
    path = folder / "7"
    path.write_bytes(content)
    with pytest.raises(DamagedPoint, match=str(path)):
        read(path)


@COMMON
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_byte_that_has_changed_is_noticed(tmp_path: Path, content: bytes, place: float, mask: int) -> None:
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= mask
    is_refused(tmp_path, bytes(damaged))


def test_no_byte_of_head_and_manifest_is_left_out(tmp_path: Path, content: bytes) -> None:
    for place in (*range(16), *range(len(content) - 600, len(content))):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        is_refused(tmp_path, bytes(damaged))


@COMMON
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_is_refused(tmp_path: Path, content: bytes, place: float) -> None:
    is_refused(tmp_path, content[: int(place * len(content))])


@COMMON
@given(place=st.floats(0, 1, exclude_max=True), other=st.binary(min_size=1, max_size=100))
def test_bytes_that_came_in_between_are_noticed(tmp_path: Path, content: bytes, place: float, other: bytes) -> None:
    cut = int(place * len(content))
    is_refused(tmp_path, content[:cut] + other + content[cut:])


def test_another_members_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "1"
    path.write_bytes(content)
    with pytest.raises(DamagedPoint, match="memoryx-1 of job-1"):
        read(path, "memoryx-1 of job-1")
    (tmp_path / "2").symlink_to(path)
    with pytest.raises(OSError, match=str(tmp_path / "2")):
        read(tmp_path / "2")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_point_may_have_two_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr("os.link", refuse)
    write(tmp_path).complete()
    copy_point(tmp_path, 1, 2)
    (tmp_path / "1").unlink()
    assert read(tmp_path / "2").keys() == VALUES.keys()
    with pytest.raises(FileNotFoundError):
        copy_point(tmp_path, 1, 3)
    assert os.listdir(tmp_path) == ["2"]


def test_a_disk_without_room_is_noticed_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 100, 2, 2, 10, 10, 10, 0, 255))
    monkeypatch.setattr("os.fstatvfs", lambda descriptor: full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        PointWriter(tmp_path, 1, places_of(VALUES), OWNER, stays_in_memory=True)
    assert not os.listdir(tmp_path)

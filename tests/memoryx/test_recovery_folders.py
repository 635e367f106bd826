"""Where recovery points lie, who may read them, and what is swept."""

import os
import time
from pathlib import Path

import pytest

from waferbox.states.point_file import MAGIC
from waferbox.states.point_folders import (
    folder_identity,
    make_member_folder,
    member_folder,
    remove_partial,
    remove_points,
    sweep,
)


def fill(folder: Path, *names: str) -> None:
    make_member_folder(folder)
    for name in names:
        (folder / name).write_bytes(MAGIC + b"...")


def left(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", "a b", "-x", "a\n", "a" * 129, "a\0", "ä"])
def test_names_that_nobody_makes_are_refused(tmp_path: Path, name: str) -> None:
    for job, member in ((name, "memoryx-0"), ("job-1", name)):
        with pytest.raises(ValueError, match="no name for a folder"):
            member_folder(tmp_path, job, member)


def test_folders_are_their_users_alone(tmp_path: Path) -> None:
    folder = member_folder(tmp_path / "root", "job-1", "memoryx-0")
    make_member_folder(folder)
    make_member_folder(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="memoryx-0"):
        make_member_folder(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="memoryx-0"):
        make_member_folder(folder)


def test_points_are_removed_up_to_a_number_and_folders_with_the_last(tmp_path: Path) -> None:
    first, second = (member_folder(tmp_path, "job-1", member) for member in ("memoryx-0", "memoryx-1"))
    fill(first, "1", "2", "10", "11.0123abcd.partial")
    fill(second, "3")
    remove_partial(first)
    remove_points(first, 10)
    assert left(tmp_path) == {"job-1/memoryx-0/10", "job-1/memoryx-1/3"}
    remove_points(first, 2**64 - 1)
    assert not first.exists()
    remove_points(first, 2**64 - 1)
    remove_points(second, 2**64 - 1)
    assert not first.parent.exists()


def test_jobs_that_nobody_has_touched_are_swept(tmp_path: Path) -> None:
    """A job of whose members one is at work stays as a whole; so does whatever else lies there."""
    old, young = member_folder(tmp_path, "old", "memoryx-0"), member_folder(tmp_path, "young", "memoryx-0")
    foreign = tmp_path / "photos" / "2019"
    fill(old, "1", "2.ab12.partial")
    fill(member_folder(tmp_path, "old", "wafer-0"), "1")
    fill(young, "1")
    fill(member_folder(tmp_path, "young", "memoryx-1"), "1")
    fill(foreign, "cat.jpg")
    (foreign / "1").write_bytes(b"not a point")
    before = time.time() - 100
    for path in tmp_path.rglob("*"):
        if path != young:
            os.utime(path, (before, before))
    sweep(tmp_path, 1000)
    assert len(left(tmp_path)) == 7
    sweep(tmp_path, 50)
    assert left(tmp_path) == {
        "young/memoryx-0/1",
        "young/memoryx-1/1",
        "photos/2019/cat.jpg",
        "photos/2019/1",
    }
    assert not (tmp_path / "old").exists()
    sweep(tmp_path / "nothing here")


def test_a_folder_is_the_same_by_whatever_path(tmp_path: Path) -> None:
    first, second, link = (tmp_path / name for name in ("first", "second", "link"))
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)
    assert folder_identity(first) == folder_identity(link) == folder_identity(second / ".." / "first")
    assert folder_identity(first) != folder_identity(second)
    with pytest.raises(FileNotFoundError):
        folder_identity(tmp_path / "nowhere")

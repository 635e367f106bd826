"""What is said of a folder that takes no files."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.coordinator.record import RecordFolder
from waferbox.host.folders import secret_key, why_not_kept, write_whole
from waferbox.states.point_folders import make_member_folder


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_nothing_in_the_cache_can_be_written_by_others(tmp_path: Path) -> None:
    cache = tmp_path / "home" / "cache"
    secret_key(cache / "plans.key")
    write_whole(cache / "cached_compile" / "step" / "machine.json", b"{}")
    make_member_folder(cache / "recovery" / "job-1" / "memoryx-0")
    record = RecordFolder(cache / "jobs" / "job-1")
    record.make()
    record.write("record", b"content")
    made = [tmp_path / "home", *(tmp_path / "home").rglob("*")]
    assert len(made) == 12
    assert not [path for path in made if path.stat().st_mode & 0o022]


@pytest.mark.usefixtures("open_umask")
def test_the_umask_says_who_writes_to_what_is_the_users_own(tmp_path: Path) -> None:
    write_whole(tmp_path / "run" / "artifact", b"", by_umask=True)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "run" / "artifact").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_folder_needs_room(reason: int, tmp_path: Path) -> None:
    text = why_not_kept(tmp_path / "cache", 2_000_000, os.strerror(reason))
    free = rf"{os.strerror(reason)} (2.00 MB are needed, "
    assert text.startswith(f"{tmp_path / 'cache'}: {free}")
    assert text.endswith("Make room there, or start the cluster with WAFERBOX_CACHE set to another folder")


def test_a_folder_that_may_not_be_written_does_not_need_room(tmp_path: Path) -> None:
    text = why_not_kept(tmp_path, 2_000_000, os.strerror(errno.EACCES))
    way = "Start the cluster with WAFERBOX_CACHE set to another folder"
    assert text == f"{tmp_path}: {os.strerror(errno.EACCES)}. {way}"
    assert "Make room there" in why_not_kept(tmp_path, 2 * shutil.disk_usage(tmp_path).free, None)

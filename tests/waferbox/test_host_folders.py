"""What is said of a folder that takes no files."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from waferbox.host.folders import why_not_kept


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

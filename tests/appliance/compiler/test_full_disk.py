"""Nothing is left in parts on a disk that is really full, and nothing needs such a disk that can do without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import NoMounts, on_small_disk

WRITES = Path(__file__).parents[1] / "full_disk_writes.py"
DISK_BYTES = 16 << 20


@pytest.mark.cluster
def test_a_full_disk_takes_files_whole_or_not_at_all(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        words = on_small_disk(disk, DISK_BYTES)
    except NoMounts as error:
        pytest.skip(str(error))
    variables = {**os.environ, "TMPDIR": str(tmp_path), "WAFERBOX_CACHE": str(disk / "cache")}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(disk / "torch")  # which torch would make among the temporary files
    done = subprocess.run(
        [*words, sys.executable, str(WRITES), str(disk)], env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert list(tmp_path.iterdir()) == [disk]

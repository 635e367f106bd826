"""A job whose cluster has no room for what it would keep: it goes on, and the user reads once where room is wanted."""

from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, StartScript
from full_disk import NoMounts, on_small_disk

DISK_BYTES = 32 << 10


@pytest.mark.cluster
def test_a_full_disk_under_the_cache_is_named_and_ends_no_job(start_script: StartScript, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        words = on_small_disk(disk, DISK_BYTES)
    except NoMounts as error:
        pytest.skip(str(error))
    arguments = ("runs", "--artifacts", "artifacts", "--num-csx", 2)
    script = start_script(
        SCRIPTS / "faults.py", *arguments, management=None, prefix=words, WAFERBOX_CACHE=str(disk / "cache")
    )
    assert script.wait() == 0, script.errors
    assert script.output.endswith("step 20\ndone\n")
    warnings = [line.partition("WARNING:")[2].strip() for line in script.errors.splitlines() if "WARNING" in line]
    point, plan, kernels = sorted(warnings)
    way_out = "Make room there, or start the cluster with {} set to another folder"
    for message, folder, variable in (
        (point, disk / "cache" / "recovery", "WAFERBOX_RECOVERY_DIR"),
        (plan, disk / "cache", "WAFERBOX_CACHE"),
        (kernels, disk / "cache" / "kernels", "WAFERBOX_CACHE"),
    ):
        assert f" in {folder}" in message
        assert "No space left on device (" in message
        assert message.endswith(way_out.format(variable))

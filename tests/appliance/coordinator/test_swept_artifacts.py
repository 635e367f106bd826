"""Plans that no job uses any more are removed from the cache folder, and nothing else is."""

import os
import time
from pathlib import Path

from appliance.coordinator.settings import ARTIFACT_SECONDS, sweep_artifacts

OLD, USED, HALF = "a" * 64, "b" * 64, "c" * 64


def test_plans_without_use_are_removed_with_their_reports(tmp_path: Path) -> None:
    folder = tmp_path / "cached_compile"
    folder.mkdir()
    others = [folder / "notes.txt", folder / "my.plan"]
    for file in others:
        file.touch()
    for key in (OLD, USED):
        (folder / f"{key}.plan").write_bytes(b"plan")
    for key in (OLD, USED, HALF):  # the compile of the last was killed
        (folder / key).mkdir()
        (folder / key / "report.html").touch()
    long_ago = time.time() - ARTIFACT_SECONDS - 1.0
    for entry in folder.iterdir():
        os.utime(entry, (long_ago, long_ago))
    os.utime(folder / f"{USED}.plan")
    sweep_artifacts(tmp_path)
    assert set(folder.iterdir()) == {*others, folder / f"{USED}.plan", folder / USED}
    sweep_artifacts(tmp_path / "absent")

"""Training while the disk of the artifact folder is full."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import StartCluster
from user_script import Script, step_of_cluster

import cstorch
from waferbox.execution_folders import CIRH, RECORD


def test_files_for_information_are_warned_of(
    tmp_path: Path, start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_file = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if not flags & os.O_CREAT or not Path(path).is_relative_to(tmp_path):
            return open_file(path, flags, *arguments, **options)
        os.close(open_file(path, flags, *arguments, **options))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    script = Script(tmp_path, start_cluster(step_of_cluster))
    losses: list[float] = []
    report = cstorch.step_closure(lambda loss: losses.append(loss.item()))
    monkeypatch.setattr(os, "open", refuse)
    script.loop(lambda batch: report(script.step(batch)))
    assert len(losses) == 1
    for name in (CIRH, RECORD):
        assert f"{name} is not written: No space left on device" in caplog.text
    assert [path.name for path in tmp_path.glob("executors/000001/*") if path.name != "profile.json"] == []

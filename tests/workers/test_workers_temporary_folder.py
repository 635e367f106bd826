"""The folders for temporary files of many processes of input_fns that begin and end at the same time."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from waferbox.input_process.temporary_folder import remove_abandoned_folders, use_own_folder

PROCESSES = 8
ROUNDS = 50


def begin_and_end() -> None:
    for _ in range(ROUNDS):
        if not (pid := os.fork()):
            remove_abandoned_folders()
            use_own_folder()
            folder = Path(multiprocessing.current_process()._config["tempdir"])  # type: ignore[attr-defined]
            os._exit(0 if folder.is_dir() else 1)
        assert not os.waitpid(pid, 0)[1]


def test_processes_that_begin_together_remove_no_folder_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=begin_and_end) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)
    remove_abandoned_folders()
    assert not list(tmp_path.iterdir())

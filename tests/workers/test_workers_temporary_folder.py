"""The folders for temporary files of many processes of input_fns that begin and end at the same time."""

import multiprocessing
import os
import signal
import subprocess
import sys
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
            folder = Path(multiprocessing.current_process()._config["tempdir"])  # type: ignore[attr-defined]  # not in the stubs
            os._exit(0 if folder.is_dir() else 1)
        assert not os.waitpid(pid, 0)[1]


def begin_and_end_together() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=begin_and_end) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)


def test_processes_that_begin_together_remove_no_folder_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a Python that is small: most of the time of a fork goes to the memory that there is, which is torch's here.
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_abandoned_folders()
    assert not list(tmp_path.iterdir())


def test_shared_memory_of_a_killed_process_goes_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (pid := os.fork()):
        use_own_folder()
        if not (loader := os.fork()):
            # Named as torch names what it shares, since the moment in which a name exists cannot be awaited.
            Path(f"/dev/shm/torch_{os.getpid()}_1_1").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(loader, 0)
        os._exit(0 if list(Path("/dev/shm").glob(f"torch_{loader}_*")) else 1)
    assert not os.waitpid(pid, 0)[1]
    (folder,) = tmp_path.iterdir()
    numbers = [int(entry.name) for entry in folder.iterdir()]
    assert len(numbers) == 2
    of_this_process = Path(f"/dev/shm/torch_{os.getpid()}_1_1")  # its number is in use: it stays
    of_this_process.touch()
    (folder / str(os.getpid())).touch()
    remove_abandoned_folders()
    assert not list(tmp_path.iterdir())
    assert not [shared for number in numbers for shared in Path("/dev/shm").glob(f"torch_{number}_*")]
    assert of_this_process.exists()
    of_this_process.unlink()


if __name__ == "__main__":
    begin_and_end_together()

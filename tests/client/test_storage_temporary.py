"""The temporary files of saves: what a killed one has left goes with the next, what somebody still writes stays."""

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from cstorch._internal.checkpoint_files import temporary
from cstorch.storage import load, save

# Saves a tree, and in the midst of it says so and waits for a line.
STOPPING = """
    import sys, torch
    from cstorch._internal.checkpoint_files import temporary
    from cstorch.storage import save
    write = temporary.Output.write
    def stop(self, data):
        temporary.Output.write = write
        print("writing", flush=True)
        sys.stdin.readline()
        return write(self, data)
    temporary.Output.write = stop
    save({"a": torch.arange(1000.0)}, sys.argv[1])
    print("saved", flush=True)
"""


def start_save(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(STOPPING), str(path)]
    saving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert saving.stdout is not None
    assert saving.stdout.readline() == "writing\n"
    return saving


@pytest.mark.cluster
def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    with start_save(tmp_path / "a.mdl") as saving:
        saving.kill()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("a.mdl.")
    save({"b": 1}, tmp_path / "b.mdl")
    assert os.listdir(tmp_path) == ["b.mdl"]


@pytest.mark.cluster
def test_a_save_leaves_alone_what_another_process_is_writing(tmp_path: Path) -> None:
    with start_save(tmp_path / "a.mdl") as saving:
        save({"b": 1}, tmp_path / "b.mdl")
        assert len(os.listdir(tmp_path)) == 2
        out, _ = saving.communicate("\n", timeout=60)
        assert out == "saved\n"
    assert sorted(os.listdir(tmp_path)) == ["a.mdl", "b.mdl"]
    assert torch.equal(load(tmp_path / "a.mdl")["a"], torch.arange(1000.0))


def test_a_file_that_is_removed_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = temporary._lock
    calls: list[int] = []

    def remove_first(descriptor: int) -> bool | None:
        if not calls:
            calls.append(descriptor)
            monkeypatch.setattr(temporary, "_lock", lock)
            temporary._remove_abandoned(tmp_path)
            assert os.listdir(tmp_path) == []
        return lock(descriptor)

    monkeypatch.setattr(temporary, "_lock", remove_first)
    save({"a": 1}, tmp_path / "a.mdl")
    assert calls
    assert os.listdir(tmp_path) == ["a.mdl"]


def test_without_locks_nothing_is_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    other = tmp_path / "a.mdl.0123abcd.cstorch.tmp"
    other.touch()
    save({"a": 1}, tmp_path / "a.mdl")
    assert sorted(os.listdir(tmp_path)) == ["a.mdl", other.name]


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").touch()
    save({"a": 1}, tmp_path / "a.mdl")
    assert sorted(os.listdir(tmp_path)) == ["a.mdl", "notes.tmp"]


LIMITED = """
    import resource, sys, torch
    from cstorch.storage import save
    save({"a": torch.ones(4)}, sys.argv[1] + "/small.mdl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save({"a": torch.ones(100, 1000), "b": torch.ones(100)}, sys.argv[1] + "/large.mdl")
    except OSError as error:
        print(error)
"""


@pytest.mark.cluster
def test_a_file_that_may_not_grow_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """HDF5 also sets the file's size, as it closes it."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (
        "File too large: the tensors of the checkpoint take 0.40 MB, its file takes more, and a file may have 0.02"
        in done.stdout
    ), done.stderr
    assert not done.stderr
    assert os.listdir(tmp_path) == ["small.mdl"]

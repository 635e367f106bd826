"""A model whose weights and optimizer state are four times what MemoryX may have of them in memory.

Each role is held by a control group, where those can be made: a process that takes more is killed. Elsewhere what the
roles have in memory is looked at while they run.
"""

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cluster_rig import forking
from role_server import RoleServer

from benchmarks.by_hand import ROOT
from benchmarks.larger_than_memory import SHARE, Run, Size, limit_for, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SIZE = Size(layers=20, width=1024, rows=64, steps=4)
SMALL = Size(layers=1, width=1024, rows=64, steps=4)
SLACK_BYTES = 16 << 20  # what a control group counts besides: page tables, buffers of sockets


class ControlGroups:
    """Groups of processes with a limit of memory each, of version 1 or 2."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self._folder = folder
        self._limit_file = limit_file
        self._made: list[Path] = []

    def add(self, limit_bytes: int) -> Path:
        """A new group; returns the file that takes its processes."""
        group = self._folder / f"waferbox-test-{secrets.token_hex(4)}"
        group.mkdir()
        self._made.append(group)
        (group / self._limit_file).write_text(str(limit_bytes))
        return group / "cgroup.procs"

    def close(self) -> None:
        for group in self._made:
            group.rmdir()


@pytest.fixture
def control_groups() -> Iterator[ControlGroups | None]:
    """None where none can be made."""
    for folder, limit_file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        groups = ControlGroups(folder, limit_file)
        with contextlib.suppress(OSError), contextlib.closing(groups):
            groups.add(1 << 30)
            yield groups
            return
    yield None


def hold(groups: ControlGroups, unlimited: Run) -> Callable[[Mapping[str, int]], None]:
    """Puts each role into a group: MemoryX with room for a quarter of the states, the others with what they need."""

    def put(processes: Mapping[str, int]) -> None:
        for role, process in processes.items():
            had = unlimited.resident[role]
            # What a process had before it was put there is not counted.
            grown = had.own - had.idle + SIZE.state_bytes // SHARE if role == "memoryx" else had.all - had.idle
            groups.add(grown + SLACK_BYTES).write_text(str(process))

    return put


def train_eagerly(size: Size, limit_bytes: int, groups: ControlGroups | None) -> subprocess.CompletedProcess[str]:
    """With plain PyTorch, in a process with this limit."""

    def enter() -> None:
        if tasks is not None:
            tasks.write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    tasks = groups.add(limit_bytes) if groups is not None else None
    command = [sys.executable, "-m", "benchmarks.larger_than_memory", "eager"]
    command += [word for key in Size.__slots__ for word in (f"--{key}", str(getattr(size, key)))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, preexec_fn=enter, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200
    )


def test_a_model_trains_whose_states_are_four_times_what_has_room(
    tmp_path: Path, control_groups: ControlGroups | None, role_server: RoleServer
) -> None:
    unlimited = run(SIZE, checkpoint_steps=2, start=forking(role_server))
    limit = limit_for(SIZE, unlimited)
    limited = run(
        SIZE,
        tmp_path,
        limit,
        checkpoint_steps=2,
        hold=hold(control_groups, unlimited) if control_groups is not None else lambda processes: None,
        start=forking(role_server),
    )
    assert limited.losses == unlimited.losses
    assert len(limited.checkpoints) == 2
    assert limited.checkpoints == unlimited.checkpoints  # of weights and optimizer state
    assert limited.resident["memoryx"].own <= limit
    # What wafers have read of the file does not stay with them.
    assert limited.resident["wafer"].own <= unlimited.resident["wafer"].own + SIZE.state_bytes // SHARE // 3
    assert list(tmp_path.iterdir()) == []

    small = train_eagerly(SMALL, limit, control_groups)
    assert small.returncode == 0, small.stderr
    eager = train_eagerly(SIZE, limit, control_groups)
    assert len(eager.stdout.splitlines()) < SIZE.steps
    if control_groups is not None:
        assert eager.returncode == -signal.SIGKILL, eager.stderr
    else:
        assert "memory" in eager.stderr

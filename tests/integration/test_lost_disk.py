"""A shard of MemoryX dies, and its disk is lost with it: the job goes on from the copy of its recovery point."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, StartCluster, StartScript, wait_for
from forking_server import ForkedProcess
from role_server import RoleServer

from wsc.v1 import node_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # on a busy machine

SCRIPT = SCRIPTS / "recovering.py"
START_SECONDS = 150.0
END_SECONDS = 20.0


class Shards:
    """Shards of MemoryX that the test starts, each with a disk of its own, as hosts have."""

    def __init__(self, cluster: RunningCluster, server: RoleServer, folder: Path, stack: ExitStack) -> None:
        self._cluster = cluster
        self._server = server
        self._folder = folder
        self._stack = stack
        self._numbers = count()
        self._started: dict[int, tuple[ForkedProcess, Path]] = {}  # by process id

    def start(self, number: int = 1) -> None:
        """So many more, on disks that nobody has used."""
        started = [self._start() for _ in range(number)]
        wait_for(
            lambda: {*started} <= {node.process_id for node in self._cluster.nodes(node_pb2.ROLE_MEMORYX)},
            START_SECONDS,
        )

    def _start(self) -> int:
        disk = self._folder / f"disk{next(self._numbers)}"
        arguments = ["--management", self._cluster.management]
        variables = self._cluster.surroundings.variables(WAFERBOX_RECOVERY_DIR=str(disk))
        with self._cluster.log.open("ab") as log:
            process = self._server.start("memoryx", arguments, variables, output=log.fileno())
        self._stack.callback(process.wait, END_SECONDS)
        self._stack.callback(process.terminate)
        self._started[process.pid] = process, disk
        return process.pid

    def lose(self, member: str) -> None:
        """The process dies with its disk."""
        victim = next(node for node in self._cluster.nodes(node_pb2.ROLE_MEMORYX) if node.member == member)
        process, disk = self._started[victim.process_id]
        assert points(disk), "it has kept some"
        process.kill()
        process.wait(END_SECONDS)
        shutil.rmtree(disk)
        del self._started[victim.process_id]

    def disks(self) -> list[Path]:
        """Of those that live."""
        return [disk for _, disk in self._started.values()]


def points(disk: Path) -> list[str]:
    """The files of points, and the folders, below a disk."""
    return [str(path.relative_to(disk)) for path in disk.rglob("*")]


def is_empty(disk: Path) -> bool:
    return not disk.exists() or not os.listdir(disk)


def copies(disk: Path) -> list[Path]:
    """The complete ones of others' points."""
    return [path for path in disk.glob("*/*-copy/*") if path.name.isdigit()]


@pytest.fixture
def cluster(tmp_path: Path, start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """Without MemoryX, and with recovery points as often as can be."""
    often = {"WAFERBOX_RECOVERY_SECONDS": "0.5", "WAFERBOX_REPLACEMENT_SECONDS": str(START_SECONDS)}
    with start_cluster(tmp_path / "cluster", wafers=2, memoryx=0, swarmx=1, workers=2, variables=often) as cluster:
        yield cluster


@pytest.fixture
def shards(cluster: RunningCluster, role_server: RoleServer, tmp_path: Path) -> Iterator[Shards]:
    with ExitStack() as stack:
        shards = Shards(cluster, role_server, tmp_path, stack)
        shards.start(2)
        yield shards


def run(start_script: StartScript, cluster: RunningCluster, harm: Callable[[RunningScript], None]) -> tuple[str, str]:
    """What the script prints, and says; harm is done to the cluster when it stops."""
    size = ("--num-csx", 2, "--shards", 2, "--pause", 0.1)
    script = start_script(SCRIPT, "--artifacts", "artifacts", *size, management=cluster.management)
    script.wait_for_output("30 ")
    harm(script)
    (script.surroundings.folder / "go").touch()
    assert script.wait(120) == 0, script.errors
    return script.output, script.errors


def test_the_results_are_those_of_a_run_in_which_no_disk_is_lost(
    start_script: StartScript, cluster: RunningCluster, shards: Shards
) -> None:
    expected, errors = run(start_script, cluster, lambda script: None)
    assert "The job has resumed" not in errors

    def has_resumed(script: RunningScript, times: int) -> bool:
        return script.errors.count("The job has resumed from step") == times

    def lose_one_and_then_the_other(script: RunningScript) -> None:
        for number, member in enumerate(("memoryx-0", "memoryx-1"), 1):
            shards.lose(member)
            shards.start()
            wait_for(partial(has_resumed, script, number), START_SECONDS)
            wait_for(lambda: all(copies(disk) for disk in shards.disks()))

    output, errors = run(start_script, cluster, lose_one_and_then_the_other)
    assert output == expected
    assert "memoryx-0" in errors
    assert "memoryx-1" in errors
    for disk in shards.disks():
        wait_for(partial(is_empty, disk), explain=partial(points, disk))

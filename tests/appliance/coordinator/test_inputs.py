"""Inputs are kept for workers that take the places of others, and no longer than an execution can need them."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.record import JobRecord, RecordFolder
from wsc.v1 import coordinator_pb2, node_pb2

LOADERS = ("first", "second", "third")
NEEDED = ["second", "third"]  # in the second execution: the third has been prepared already


class Nodes:
    """Notes what workers are given."""

    def __init__(self) -> None:
        self.topology = SimpleNamespace(workers=["worker"], wafers=["wafer"], num_workers_per_wafer=1)
        self.given: list[str] = []

    def send(self, workers: Iterable[Any], make: Callable[[Any], node_pb2.AttachRequest]) -> None:
        self.given += [make(SimpleNamespace(index=0)).prepare_input.loader for _ in workers]


def prepared(loader: str) -> node_pb2.PrepareInput:
    return node_pb2.PrepareInput(loader=loader, builder=loader.encode())


def test_a_new_worker_is_given_what_is_needed_still() -> None:
    nodes: Any = Nodes()
    inputs = Inputs(nodes, 1, ())
    for loader in LOADERS:
        inputs.prepare(prepared(loader))
    inputs.began("second")
    inputs.began("not prepared")
    nodes.given.clear()
    inputs.prepare_again(["another worker"])  # type: ignore[list-item]
    assert nodes.given == NEEDED


def test_an_input_that_cannot_be_removed_ends_no_job(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "job-1"
    record = JobRecord(RecordFolder(folder))
    record.begin(is_kept=True)
    for loader in LOADERS:
        asyncio.run(record.prepared(prepared(loader)))
    for path in folder.glob("input-*"):
        path.unlink()
        path.mkdir()  # as in a folder that has become read-only: unlink fails
    record.began(1, coordinator_pb2.Begin(loader="second"))
    record.close()


def test_another_coordinator_finds_what_is_needed_still(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "job-1"
    record = JobRecord(RecordFolder(folder))
    record.begin(is_kept=True)
    for loader in LOADERS:
        asyncio.run(record.prepared(prepared(loader)))
    record.began(1, coordinator_pb2.Begin(loader="first"))
    record.began(2, coordinator_pb2.Begin(loader="second"))
    record.close()
    another = JobRecord(RecordFolder(folder))
    another.hold()
    another.take_over()
    another.close()
    assert [each.loader for each in another.inputs] == NEEDED
    assert len(list(folder.glob("input-*"))) == len(NEEDED)

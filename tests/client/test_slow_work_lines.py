"""The lines of a script's log about work that takes long: where it is, and how many bytes are done."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, FakeShard
from halved_weight import Setup, run
from torch import nn
from traced_steps import names_of, outputs_of, states_of

import cstorch
from cstorch._internal import log
from cstorch._internal.log import SlowWork, logged_if_slow
from cstorch._internal.session import cluster_state, embedded, transfer
from cstorch._internal.session.cluster_state import ClusterState
from cstorch._internal.tracing import Cell, move_module, trace_step
from cstorch.distributed.cluster_config import ClusterConfig
from wsc.v1 import coordinator_pb2, plan_pb2

MEGABYTE = 250_000  # elements of float32


@contextmanager
def at_the_end(report: Callable[[], None]) -> Iterator[None]:
    """As `reported`, for work that takes just two seconds, without the time."""
    yield
    report()


@contextmanager
def never(report: Callable[[], None]) -> Iterator[None]:
    yield


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about work that has added bytes, each time as if an interval had passed."""
    lines: list[str] = []
    monkeypatch.setattr(log.logger, "info", lambda text, *arguments: lines.append(text % arguments))
    add = SlowWork.add

    def add_and_log(work: SlowWork, nbytes: int) -> None:
        add(work, nbytes)
        work.log()

    monkeypatch.setattr(SlowWork, "add", add_and_log)
    monkeypatch.setattr(log, "reported", never)
    return lines


def test_a_line_says_where_the_work_is_and_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cstorch.progress")
    work = SlowWork("Tracing step")
    work.log()
    for where in ("h.0", "h.0", "h.1"):
        work.where = where
        work.log()
    assert caplog.messages == ["Tracing step ...", "Tracing step: h.0 ...", "Tracing step: h.1 ..."]


def test_bytes_that_are_sent_again_do_not_exceed_the_sum(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cstorch.progress")
    work = SlowWork("Sending 2 state tensors")
    work.expect(1_500_000_000)
    for _ in range(3):
        work.add(700_000_000)
        work.log()
    done = [line.removeprefix("Sending 2 state tensors: ") for line in caplog.messages]
    assert done == ["0.7 of 1.5 GB ...", "1.4 of 1.5 GB ...", "1.5 of 1.5 GB ..."]


def test_the_waits_of_an_execution(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cstorch.progress")
    monkeypatch.setattr(log, "reported", at_the_end)
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    begins = (
        "Reading the first batch",
        "Tracing step (",
        "Lowering the step",
        "Opening a job of the cluster",
        "Compiling the step",
        "Starting the input_fn in the workers",
        "Loading the plan into the nodes",
        "Sending 2 state tensors",
        "Filling the buffers of the input workers",
        "Ending the execution",
    )
    lines = [record.message for record in caplog.records if record.name == "cstorch.progress"]
    assert len(lines) == len(begins)
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(begin)
        assert line.endswith(" ...")


def test_the_end_of_an_embedded_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cstorch.progress")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_EMBEDDED", "works")
    monkeypatch.setattr(embedded, "MODULE", "fake_embedded")
    monkeypatch.setattr(log, "reported", at_the_end)
    cluster = embedded.EmbeddedCluster(ClusterConfig(), tmp_path / "cluster.log")
    cluster.management()
    cluster.stop()
    lines = [record.message for record in caplog.records if record.name == "cstorch.progress"]
    assert lines == ["Ending the embedded cluster ..."]


def test_tracing_says_the_module() -> None:
    found: list[tuple[str, str]] = []
    work = SlowWork("Tracing step")

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            result = gradient * 1
            found.append(("backward", work.where))
            return result

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            found.append(("forward", work.where))
            result: torch.Tensor = Spy.apply(x)  # type: ignore[no-untyped-call]
            return result

    model = nn.Sequential(nn.Linear(4, 4), Layer())
    move_module(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        found.append(("loss", work.where))
        loss.backward()
        return loss.detach()

    trace_step(step, torch.randn(2, 4), states_of(model=model), names_of(model), outputs_of, work)
    outside = "what is outside of the model's modules"
    assert found == [("forward", "1"), ("loss", outside), ("backward", "1")]
    assert work.where == "making a graph of what was traced"


def test_checkpoints_count_bytes(lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.mdl"
    shared = torch.ones(MEGABYTE)
    cstorch.save({"a": shared, "again": shared, "b": torch.ones(2 * MEGABYTE), "step": 3}, file)
    assert lines == [f"Saving {file}: 1 of 3 MB ...", f"Saving {file}: 3 of 3 MB ..."]
    lines.clear()
    cstorch.load(file, map_location="cpu")
    assert lines == [f"Loading {file}: 1 of 3 MB ...", f"Loading {file}: 3 of 3 MB ..."]


def test_states_count_bytes(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(written=[[]])
    monkeypatch.setattr(cluster_state, "ShardConnection", lambda *_: FakeShard(cluster))
    monkeypatch.setattr(transfer, "BATCH_BYTES", 1_000_000)
    job: Any = None
    state = ClusterState("auto", job)
    cells = {name: Cell((MEGABYTE,), torch.float32) for name in "ab"}
    for cell in cells.values():
        cell.write(torch.ones(MEGABYTE))
    kind = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[MEGABYTE])
    placed = [coordinator_pb2.StatePlacement(name=name, type=kind, shard=0) for name in cells]
    with logged_if_slow("Sending 2 state tensors") as work:
        state.send(cells, placed, [coordinator_pb2.StateShard(shard=0)], cells.keys(), {}, work)
    assert lines == ["Sending 2 state tensors: 1 of 2 MB ...", "Sending 2 state tensors: 2 of 2 MB ..."]
    lines.clear()
    state.begin(cells)
    state.settle(is_saved=True)
    state.fetch_all()
    assert lines == ["Fetching 2 state tensors: 1 of 2 MB ...", "Fetching 2 state tensors: 2 of 2 MB ..."]

"""Several scripts on one cluster, and a management service that dies and comes back while a job runs."""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import parity
import pytest
import torch
from cluster_rig import PATIENCE_SECONDS, SCRIPTS, RunningScript, StartCluster, StartScript, Surroundings, wait_for
from typer.testing import CliRunner

import cerebras.pytorch as cstorch
from waferbox.cluster.launcher import ForkingLauncher
from waferbox.commands.cli import app
from waferbox.launch.spawn import Child
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

pytestmark = pytest.mark.cluster

FAULTS = SCRIPTS / "faults.py"
TWO = {"wafers": 2, "memoryx": 2, "swarmx": 2, "workers": 2}


@pytest.mark.timeout(300)  # four scripts, one after the other
def test_two_scripts_run_side_by_side_and_others_wait_for_their_turn(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster
) -> None:
    with start_cluster(tmp_path / "cluster", **TWO) as cluster:

        def start(num_steps: int) -> RunningScript:
            arguments = ("runs", "--artifacts", "artifacts", "--num-steps", num_steps)
            return start_script(FAULTS, *arguments, management=cluster.management)

        running = [start(1_000_000), start(1_000_000)]
        for script in running:
            script.wait_for_output("step 50\n")
        leaves = start(20)
        leaves.wait_for_error("waits in the queue (1 of 1) for 1 wafer, held by job-")
        stays = start(20)
        stays.wait_for_error("waits in the queue (2 of 2) for ")
        leaves.interrupt()
        stays.wait_for_error("waits in the queue (1 of 1) for 1 wafer, held by job-")
        assert leaves.wait() != 0
        assert "\nKeyboardInterrupt\n" in leaves.errors  # a change of the queue may be logged after it
        assert stays.output == ""
        running[0].interrupt()
        running[0].wait()
        assert stays.wait() == 0, stays.errors
        assert "has its nodes now" in stays.errors
        assert stays.output.endswith("step 20\ndone\n")
        assert running[1].process.poll() is None
        running[1].interrupt()
        running[1].wait()


def free_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


class Management:
    """A management service at a fixed port that can be killed and started again, and one node of each role."""

    def __init__(self) -> None:
        self._launcher = ForkingLauncher()
        self.address = free_address()
        self._channel = make_channel(self.address)
        self.stub = management_pb2_grpc.ManagementStub(self._channel)
        self.process: Any = None
        self.start()
        self._nodes = [
            self._launcher.start(role, ["--management", self.address]) for role in ("memoryx", "wafer", "workers")
        ]
        wait_for(lambda: len(self.ask().nodes) == 3)
        self._ingress: subprocess.Popen[bytes] | None = None

    def start_ingress(self) -> str:
        """Its address."""
        address = free_address()
        command = [sys.executable, "-m", "appliance.ingress", "--management", self.address, "--listen", address]
        self._ingress = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_for(lambda: len(self.ask().nodes) == 4, 30.0)
        return address

    def start(self) -> None:
        self.process = self._launcher.start("appliance", ["--listen", self.address])

    def kill(self) -> None:
        assert isinstance(self.process, Child)
        self.process.kill()
        assert self.process.wait(PATIENCE_SECONDS) == -9

    def ask(self) -> management_pb2.ListNodesResponse:
        with contextlib.suppress(grpc.RpcError):
            return self.stub.ListNodes(management_pb2.ListNodesRequest(), timeout=1.0)
        return management_pb2.ListNodesResponse()

    def jobs(self) -> list[management_pb2.JobInfo]:
        with contextlib.suppress(grpc.RpcError):
            return list(self.stub.ListJobs(management_pb2.ListJobsRequest(), timeout=1.0).jobs)
        return []

    def close(self) -> None:
        self._channel.close()
        if self._ingress is not None:
            self._ingress.terminate()
            assert self._ingress.wait(10.0) == 0
        self.process.close()
        self._launcher.close()


@pytest.fixture
def management(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Management]:
    surroundings = Surroundings(tmp_path / "cluster", cache)
    for name, value in surroundings.variables(WAFERBOX_RUN_AHEAD_STEPS="1").items():
        monkeypatch.setenv(name, value)
    management = Management()
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", management.address)
    try:
        yield management
    finally:
        cstorch.close_backend()
        management.close()
        monkeypatch.delenv("WAFERBOX_TEST_MARK")
    own = os.getpid()
    wait_for(lambda: not [one for one in surroundings.processes() if one.pid != own])


@pytest.mark.parametrize("through_ingress", [False, True])
def test_a_job_trains_on_while_management_is_killed_and_started_again(
    management: Management,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    through_ingress: bool,
) -> None:
    address = management.address
    if through_ingress:
        address = management.start_ingress()
        monkeypatch.setenv("WAFERBOX_MANAGEMENT", address)
        monkeypatch.setenv("WAFERBOX_LANE", "grpc")
    before: list[management_pb2.JobInfo] = []
    shown: list[str] = []
    options = argparse.Namespace(
        mode="CSX",
        result=tmp_path / "result",
        optimizer="adamw",
        reduction="mean",
        lr=0.01,
        num_csx=1,
        shards=1,
        workers=1,
        batch_size=24,
        num_steps=12,
        max_norm=1.0,
    )

    followed = tmp_path / "followed"
    followers: list[subprocess.Popen[bytes]] = []

    def follow() -> None:
        before.extend(management.jobs())
        command = [sys.executable, "-m", "waferbox", "logs", "-f", before[0].job]
        with followed.open("wb") as log, followed.with_suffix(".errors").open("wb") as errors:
            followers.append(subprocess.Popen(command, stdout=log, stderr=errors))
        request.addfinalizer(followers[0].kill)
        wait_for(lambda: b"has its nodes" in followed.read_bytes(), 20.0)

    def is_back() -> bool:
        nodes = [node for node in management.ask().nodes if node.role != node_pb2.ROLE_INGRESS]
        return len(nodes) == 3 and all(node.job == before[0].job for node in nodes) and len(management.jobs()) == 1

    def is_shown() -> bool:  # an ingress finds a management service that comes back within a second or so
        shown.append(CliRunner().invoke(app, ["get", "jobs", "--management", address]).stdout)
        return bool(shown[-1])

    def disturb(step: int) -> None:
        actions: dict[int, Callable[[], object]] = {
            3: follow,
            4: management.kill,
            7: management.start,
            8: lambda: wait_for(is_back),
            9: lambda: wait_for(is_shown),
        }
        actions.get(step, lambda: None)()

    ours, theirs = parity.run_cstorch(options, disturb), parity.run_plain(options)
    losses, expected = torch.tensor(ours["losses"]), torch.tensor(theirs["losses"])
    assert (losses - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert before[0].job in shown[-1]
    assert "running" in shown[-1]
    cstorch.close_backend()
    wait_for(lambda: [job.phase for job in management.jobs()] == [management_pb2.JOB_PHASE_SUCCEEDED])
    (job,) = management.jobs()
    assert (job.job, job.created, job.user) == (before[0].job, before[0].created, before[0].user)
    assert {(node.address, node.member) for node in job.nodes} == {
        (node.address, node.member) for node in before[0].nodes
    }
    wait_for(lambda: not any(node.job for node in management.ask().nodes))
    assert followers[0].wait(PATIENCE_SECONDS) == 0
    lines = followed.read_text().splitlines()
    assert len(lines) > 5
    assert sorted(lines) == sorted(CliRunner().invoke(app, ["logs", job.job]).stdout.splitlines())  # each once
    away, back, ended = followed.with_suffix(".errors").read_text().splitlines()
    assert away.endswith(f"{address} is away; waiting for it, 60 s at most")
    assert "it is back, after " in back
    assert ended == f"{job.job} has ended (succeeded)"

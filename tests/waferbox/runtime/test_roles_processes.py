"""The roles as processes of their own, started by hand with a management address and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from role_rig import AttachedNode, FakeManagement, SmallJob, StateClient, Topology
from small_plan import INNER, OUTER, SmallPlan

from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, node_pb2

ROLES = {"memoryx": node_pb2.ROLE_MEMORYX, "swarmx": node_pb2.ROLE_SWARMX, "wafer": node_pb2.ROLE_WAFER}

pytestmark = pytest.mark.cluster


class Processes:
    """Started roles, by name of the package."""

    def __init__(self, management: FakeManagement) -> None:
        self.management = management
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.registrations: dict[str, management_pb2.RegisterRequest] = {}

    def start(self, package: str) -> management_pb2.RegisterRequest:
        self.started[package] = subprocess.Popen(
            [sys.executable, "-m", package, "--management", self.management.address]
        )
        self.registrations[package] = self.management.wait_for(ROLES[package])
        return self.registrations[package]


@pytest.fixture
def processes() -> Iterator[Processes]:
    management = FakeManagement()
    processes = Processes(management)
    try:
        yield processes
    finally:
        for process in processes.started.values():
            process.terminate()
        for process in processes.started.values():
            process.wait(20)
        management.close()


@pytest.mark.parametrize("lane", [node_pb2.LANE_SHARED_MEMORY, node_pb2.LANE_GRPC])
def test_processes_train_and_a_death_is_noticed(processes: Processes, lane: "node_pb2.Lane.ValueType") -> None:
    for package in ROLES:
        registered = processes.start(package)
        assert registered.version == WIRE_VERSION
        assert registered.process_id == processes.started[package].pid
    nodes = [AttachedNode(processes.registrations[p].address, f"{p}-0", 0, lane) for p in ROLES]
    memoryx, swarmx, wafer = nodes
    job = SmallJob(SmallPlan(num_shards=1, num_wafers=1), Topology([memoryx], [swarmx], [wafer]), lane)
    try:
        job.load(1)
        client = StateClient(memoryx, lane)
        client.write({"w0": torch.full((INNER, OUTER), 0.01), "count": torch.zeros(())})
        job.start(1, num_steps=5, activation_steps=1, run_ahead_steps=8)
        losses = [job.outputs(step)[0] for step in range(1, 6)]
        assert losses == pytest.approx(job.plan.expected(5).losses, rel=1e-4, abs=1e-3)
        for node in nodes:
            node.expect("finished")
        found = client.read({"w0": (INNER, OUTER)})["w0"]
        torch.testing.assert_close(found, job.plan.expected(5).weights[-1][0], rtol=1e-5, atol=1e-5)
        client.close()
        job.stop(1)

        assert {package: os.sched_getscheduler(process.pid) for package, process in processes.started.items()} == {
            "memoryx": os.SCHED_BATCH,
            "swarmx": os.SCHED_BATCH,
            "wafer": os.SCHED_OTHER,
        }

        job.load(2)
        job.start(2, num_steps=10**6, activation_steps=10**6, run_ahead_steps=8)
        os.kill(processes.started["wafer"].pid, signal.SIGKILL)
        failure = swarmx.expect("failed").failed
        assert failure.kind == node_pb2.Failure.KIND_NODE
        assert failure.peer == "wafer-0"
    finally:
        for node in nodes:
            node.close()
        job.close()
    for package in ("memoryx", "swarmx"):
        processes.started[package].send_signal(signal.SIGTERM)
        assert processes.started[package].wait(20) == 0


def test_a_refused_process_says_why_and_exits(processes: Processes) -> None:
    processes.management.refusal = "management is 9.9, this node is 0.1"
    result = subprocess.run(
        [sys.executable, "-m", "swarmx", "--management", processes.management.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "management is 9.9, this node is 0.1" in result.stderr

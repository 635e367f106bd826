"""The Prometheus endpoints, read as Prometheus reads them."""

import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.management.jobs import JobEntry
from appliance.management.metrics import ManagementCollector
from appliance.management.service import ManagementState
from waferbox.rpc.address import split_address
from waferbox.runtime.metrics import MetricsServer, RoleCollector
from wsc.v1 import management_pb2, node_pb2
from wsc.v1.observation_pb2 import JobEvent, NodeReport, Scalar

REPORT = NodeReport(
    node="wafer-0",
    step=12,
    seconds={"total": 3.0, "wait": 1.0, "compute": 1.5, "send": 0.5},
    bytes={"received": 4096, "sent": 8},
    queued={"received": 2, "sent": 0},
    cpu_seconds=9.0,
    memory_bytes=1 << 30,
)


def scrape(server: MetricsServer) -> dict[tuple[str, ...], float]:
    """Values by name and labels, these in the order of their names."""
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
            for family in families
            for s in family.samples
        }


def test_a_role_shows_its_execution_while_it_runs() -> None:
    reports: list[NodeReport] = []
    server = MetricsServer(RoleCollector("wafer", lambda: reports[-1] if reports else None), "wafer", "127.0.0.1", 0)
    try:
        idle = scrape(server)
        assert idle["waferbox_running", "wafer"] == 0
        assert ("waferbox_steps_total", "wafer") not in idle
        assert idle["process_resident_memory_bytes", "wafer"] > 2**20
        reports.append(REPORT)
        found = scrape(server)
        assert found["waferbox_running", "wafer"] == 1
        assert found["waferbox_steps_total", "wafer"] == 12
        parts = {key[1]: value for key, value in found.items() if key[0] == "waferbox_step_seconds_total"}
        assert parts == {"wait": 1.0, "compute": 1.5, "send": 0.5}
        assert found["waferbox_bytes_total", "received", "wafer"] == 4096
        assert found["waferbox_queued", "received", "wafer"] == 2
        with pytest.raises(OSError, match="in use"):
            MetricsServer(RoleCollector("wafer", lambda: None), "wafer", *split_address(server.address))
    finally:
        server.close()
    with socket.socket() as again:
        assert again.connect_ex(split_address(server.address)) != 0


def test_management_shows_nodes_jobs_and_how_they_go() -> None:
    nodes = [
        management_pb2.NodeInfo(role=node_pb2.ROLE_WAFER, job="job-1"),
        management_pb2.NodeInfo(role=node_pb2.ROLE_WAFER),
        management_pb2.NodeInfo(role=node_pb2.ROLE_WORKER),
    ]

    def job(name: str, phase: "management_pb2.JobPhase.ValueType") -> JobEntry:
        one = JobEntry(name=name, request=management_pb2.CreateJobRequest(), token="", created=0.0)
        one.report.phase = phase
        one.history.add([JobEvent(report=REPORT), JobEvent(scalar=Scalar(name="loss", step=12, value=0.5))])
        return one

    jobs = [
        job("job-1", management_pb2.JOB_PHASE_RUNNING),
        job("job-2", management_pb2.JOB_PHASE_QUEUED),
        job("job-3", management_pb2.JOB_PHASE_FAILED),
    ]
    jobs[-1].ended = 1.0
    server = MetricsServer(
        ManagementCollector(lambda: ManagementState(nodes=nodes, jobs=jobs)), "management", "127.0.0.1", 0
    )
    try:
        found = scrape(server)
    finally:
        server.close()
    assert found["waferbox_nodes", "wafer", "leased"] == found["waferbox_nodes", "wafer", "free"] == 1
    assert (found["waferbox_nodes", "worker", "free"], found["waferbox_nodes", "swarmx", "free"]) == (1, 0)
    assert (found["waferbox_jobs", "running"], found["waferbox_jobs", "failed"]) == (1, 1)
    assert found["waferbox_queue_length",] == 1
    assert found["process_resident_memory_bytes", "management"] > 2**20
    assert found["waferbox_job_scalar", "job-1", "loss"] == 0.5
    assert found["waferbox_job_steps_total", "job-1", "wafer-0"] == 12
    assert found["waferbox_job_memory_bytes", "job-1", "wafer-0"] == 1 << 30
    assert not any("job-3" in key for key in found)  # it has ended


@pytest.mark.cluster
def test_without_the_option_nothing_is_imported() -> None:
    code = "import sys, waferbox.runtime.node, appliance.__main__; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr

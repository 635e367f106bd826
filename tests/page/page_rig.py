"""A source of the page's content that tests change, in place of a cluster."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from appliance.drawing.pages import template_environment
from waferbox import roles
from wsc.v1 import management_pb2, node_pb2, observation_pb2

HOSTILE = '</script><script>window.broken=1</script><img src=x onerror="window.broken=1">\'&'
ROLES = {role.number: role.name for role in roles.LEASED}
WORK = {"wafer": "compute", "memoryx": "update", "swarmx": "reduce", "worker": "input"}


class FakeSource:
    """A PageSource whose content tests write. `add_events` may be called from any thread."""

    def __init__(self) -> None:
        self.node_list: list[management_pb2.NodeInfo] = []
        self.job_list: list[management_pb2.JobInfo] = []
        self.kept: dict[str, list[observation_pb2.JobEvent]] = {}

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return list(self.node_list)

    async def targets(self) -> Sequence[tuple[str, str]]:
        return [(ROLES[node.role], node.metrics) for node in self.node_list if node.metrics]

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        return list(self.job_list)

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        return next((job for job in self.job_list if job.job == name), None)

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        num_sent = 0
        while True:
            kept = self.kept.get(name, [])
            ended = any(job.job == name and job.ended for job in self.job_list)
            if num_sent < len(kept):
                yield observation_pb2.JobEvents(events=kept[num_sent:])
                num_sent = len(kept)
            if ended:
                return
            await asyncio.sleep(0.02)

    def add_events(self, name: str, *events: observation_pb2.JobEvent) -> None:
        """Adds events to a job."""
        self.kept[name] = [*self.kept.get(name, []), *events]


def make_nodes(wafers: int = 2, memoryx: int = 2, workers: int = 2) -> list[management_pb2.NodeInfo]:
    counts = {
        node_pb2.ROLE_WAFER: wafers,
        node_pb2.ROLE_MEMORYX: memoryx,
        node_pb2.ROLE_SWARMX: 1,
        node_pb2.ROLE_WORKER: workers,
    }
    return [
        management_pb2.NodeInfo(
            node_id=f"{ROLES[role]}-{number:04x}",
            role=role,
            address=f"127.0.0.1:{40000 + 100 * role + number}",
            host="rack-1" if number % 2 == 0 else "rack-2",
            lease_left_seconds=4.5,
        )
        for role, count in counts.items()
        for number in range(count)
    ]


def lease(nodes: Sequence[management_pb2.NodeInfo], job: str) -> list[management_pb2.NodeInfo]:
    """Give all of them to a job."""
    counts: dict[int, int] = {}
    for node in nodes:
        index = counts.get(node.role, 0)
        counts[node.role] = index + 1
        node.job, node.member = job, f"{ROLES[node.role]}-{index}"
    return list(nodes)


def make_job(name: str, phase: "management_pb2.JobPhase.ValueType", **fields: Any) -> management_pb2.JobInfo:
    now = time.time()
    values: dict[str, Any] = {
        "user": "ada",
        "host": "desk",
        "priority": 2,
        "num_csx": 2,
        "created": now - 200,
        "started": now - 190,
        "age_seconds": 200.0,
    }
    return management_pb2.JobInfo(job=name, phase=phase, **{**values, **fields})


def scalar(step: int, value: float, name: str = "loss", execution: int = 1) -> observation_pb2.JobEvent:
    return observation_pb2.JobEvent(
        scalar=observation_pb2.Scalar(execution=execution, step=step, name=name, value=value, time=time.time())
    )


def log(node: str, level: int, message: str) -> observation_pb2.JobEvent:
    record = observation_pb2.LogRecord(node=node, time=time.time(), level=level, logger=f"{node}.x", message=message)
    return observation_pb2.JobEvent(log=record)


def report(node: str, step: int, at: float, execution: int = 1) -> observation_pb2.JobEvent:
    """A node that does a step in 10 ms, most of it work."""
    work = WORK[node.rpartition("-")[0]]
    return observation_pb2.JobEvent(
        report=observation_pb2.NodeReport(
            node=node,
            time=at,
            execution=execution,
            epoch=execution,
            step=step,
            seconds={"total": step * 0.01, work: step * 0.007, "wait": step * 0.002, "send": step * 0.001},
            bytes={"received": step * 1_000_000, "sent": step * 500_000},
            cpu_seconds=step * 0.008,
            memory_bytes=300 << 20,
        )
    )


def write_report(folder: Path, layers: Sequence[str], backward_seconds: float = 0.002) -> str:
    """A compile report with these layers, as the compiler leaves it; returns the artifact's folder."""
    folder.mkdir(parents=True)
    part = 922 // len(layers)
    data = {
        "num_csx": 2,
        "batch_rows": 64,
        "totals": {"parameters": 1000, "streamed_bytes": 5000, "step_seconds": 0.0097},
        "layers": [
            {
                "layer": layer,
                "parameters": 100 * (number + 1),
                "streamed_bytes": 400_000 * (number + 1),
                "gradient_bytes": 400_000,
                "forward_seconds": 0.001 * (number + 1),
                "backward_seconds": backward_seconds,
            }
            for number, layer in enumerate(layers)
        ],
        "shards": [{"shard": 0, "weight_bytes": 700_000, "other_bytes": 1_400_000}],
        "floor_plan": {
            "width": 922,
            "height": 922,
            "regions": [
                {"layer": layer, "x": number * part, "y": 0, "width": part, "height": 922}
                for number, layer in enumerate(layers)
            ],
        },
    }
    (folder / "report.json").write_text(json.dumps(data))
    page = template_environment(folder).from_string(
        '{% extends "page.html" %}{% block title %}Compile report{% endblock %}{% block content %}layers{% endblock %}'
    )
    (folder / "report.html").write_text(page.render())
    return str(folder)

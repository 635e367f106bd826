"""What a node costs management: time and memory, with thousands of nodes that are emulated, and dozens of jobs."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.light_nodes import LightClient, LightCoordinators, LightNodes
from benchmarks.show import show
from waferbox import settings
from wsc.v1 import management_pb2, node_pb2

# Of each hundred nodes.
SHARES: Final = (
    (node_pb2.ROLE_WAFER, 45),
    (node_pb2.ROLE_WORKER, 45),
    (node_pb2.ROLE_MEMORYX, 5),
    (node_pb2.ROLE_SWARMX, 5),
)
NUM_NODES: Final = 2000
NUM_JOBS: Final = 50
NUM_WAFERS: Final = 30  # of a job: half of the jobs wait for the others
HOLD_SECONDS: Final = 0.5
IDLE_SECONDS: Final = 5.0
END_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a process."""

    cpu_seconds: float
    resident_bytes: int
    threads: int


def usage(pid: int) -> Usage:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return Usage(
        cpu_seconds=(int(fields[11]) + int(fields[12])) / ticks,
        threads=int(fields[17]),
        resident_bytes=int(fields[21]) * page,
    )


# What `python -m appliance` does, with leases of the seconds that come first.
_MANAGEMENT: Final = """
import functools, sys
from appliance import __main__ as management
management.ManagementSettings = functools.partial(management.ManagementSettings, lease_seconds=float(sys.argv[1]))
sys.exit(management.main(sys.argv[2:]))
"""


@contextlib.contextmanager
def management(lease_seconds: float = 5.0) -> Iterator[tuple[str, int]]:
    """A management service in a process of its own: its address and pid."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, open(reader, encoding="utf-8") as announcement:
        options = ["--listen", "127.0.0.1:0", "--cache-root", folder, "--announce-fd", str(writer)]
        environment = {**os.environ, settings.LOG_LEVEL.name: "warning"}
        process = subprocess.Popen(
            [sys.executable, "-c", _MANAGEMENT, str(lease_seconds), *options], pass_fds=[writer], env=environment
        )
        os.close(writer)
        try:
            yield json.loads(announcement.readline())["management"], process.pid
        finally:
            process.terminate()
            process.wait(END_SECONDS)


async def _measure(address: str, pid: int) -> dict[str, float]:
    async with LightNodes(address, NUM_NODES) as nodes, LightClient(address) as client:
        empty, begin = usage(pid), time.perf_counter()
        for role, share in SHARES:
            await nodes.register(role, NUM_NODES * share // 100)
        full, registered = usage(pid), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        idle = usage(pid)
        coordinators = LightCoordinators(address, NUM_WAFERS, HOLD_SECONDS)
        async with coordinators.serving() as ingress:
            await nodes.register(node_pb2.ROLE_INGRESS, 1, ingress)
            busy, began = usage(pid), time.perf_counter()
            await client.create_jobs(NUM_JOBS, NUM_WAFERS)
            while any(job.phase != management_pb2.JOB_PHASE_SUCCEEDED for job in await client.jobs()):
                await asyncio.sleep(0.1)
            done, ended = usage(pid), time.perf_counter()
        await nodes.kill()
        noticed = await client.until_nodes(NUM_NODES)
        assert not nodes.broken()
        assert not coordinators.shared
    return {
        "time to register, per node": (registered - begin) / NUM_NODES * 1e6,
        "time of the processor to register, per node": (full.cpu_seconds - empty.cpu_seconds) / NUM_NODES * 1e6,
        "memory per node": (full.resident_bytes - empty.resident_bytes) / NUM_NODES / 1e3,
        "heartbeats of all nodes": (idle.cpu_seconds - full.cpu_seconds) / IDLE_SECONDS * 100,
        "threads": done.threads,
        f"{NUM_JOBS} jobs of {NUM_WAFERS} wafers, {HOLD_SECONDS:g} s each": ended - began,
        "time of the processor, per job": (done.cpu_seconds - busy.cpu_seconds) / NUM_JOBS * 1e3,
        "until the end of a node is noticed": noticed * 1e3,
    }


UNITS: Final = ("us", "us", "kB", "% of a core", "", "s", "ms", "ms")


def bench(repeats: int) -> None:
    """Prints the figures of the management process."""
    print(f"management with {NUM_NODES} emulated nodes, each with a connection of its own")
    runs = []
    for _ in range(repeats):
        with management() as (address, pid):
            runs.append(asyncio.run(_measure(address, pid)))
    for unit, label in zip(UNITS, runs[0], strict=True):
        show(label, [run[label] for run in runs], unit)

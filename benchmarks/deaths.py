"""How long a job stands still when a node dies: until its steps go on, and until the script gets a step that is new.

The first is what the coordinator tells (`waferbox describe job`). The second has in it what is run again: all steps
since the last recovery point, or since the first step.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.runs import ENVIRONMENT
from waferbox import roles
from waferbox.cluster.embedded_process import start_embedded, stop_embedded
from waferbox.cluster.launcher import ClusterSettings
from waferbox.launch.local_clusters import Starter
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

MODELS: Final = {"fc_training": 1_000_000, "gpt2_training": 1_000}  # steps: far more than are run
ROLES: Final = {role.name: role.number for role in roles.LEASED if role is not roles.SWARMX}  # a single wafer has none
STEPS: Final = 4  # that are done before somebody dies
RECOVERY_SECONDS: Final = "5"
DEADLINE_SECONDS: Final = 300.0


def bench(repeats: int) -> None:
    print(f"seconds from a death until steps go on, and until a new step; a recovery point every {RECOVERY_SECONDS} s")
    for module in MODELS:
        for role in ROLES:
            found = [measure(module, role) for _ in range(repeats)]
            on, new = (statistics.median(each) for each in zip(*found, strict=True))
            print(f"  {module:14s} {role:8s} {on:6.2f}   {new:6.2f}", flush=True)


def measure(module: str, role: str) -> tuple[float, float]:
    """Seconds until the steps go on, and until the script has a step that it had not."""
    with tempfile.TemporaryDirectory() as cache, _running(module, cache) as stub:
        job = _wait(stub, lambda job: job.step >= STEPS and bool(job.nodes))
        victim = next(node for node in job.nodes if node.role == ROLES[role])
        began = time.monotonic()
        os.kill(victim.process_id, signal.SIGKILL)
        job = _wait(stub, lambda job: job.num_restarts > 0)
        restart = job.restarts[0]
        _wait(stub, lambda job: job.step > restart.reached_step)
        return restart.seconds, time.monotonic() - began


@contextmanager
def _running(module: str, cache: str) -> Iterator[management_pb2_grpc.ManagementStub]:
    """A script that trains, on a cluster of its own."""
    variables = {**ENVIRONMENT, "WAFERBOX_CACHE": cache, "WAFERBOX_RECOVERY_SECONDS": RECOVERY_SECONDS}
    os.environ.update(variables)
    process, management, *_ = start_embedded(ClusterSettings(), Starter.RUN, "deaths")
    command = [sys.executable, "-m", f"benchmarks.{module}", "cluster", "--threads", "1"]
    script = subprocess.Popen(
        [*command, "--num-steps", str(MODELS[module])],
        env={**os.environ, "WAFERBOX_MANAGEMENT": management},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with make_channel(management) as channel:
            yield management_pb2_grpc.ManagementStub(channel)
    finally:
        script.kill()
        script.wait()
        stop_embedded(process)


def _wait(
    stub: management_pb2_grpc.ManagementStub, condition: Callable[[management_pb2.JobInfo], bool]
) -> management_pb2.JobInfo:
    """The job, once the condition holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        jobs = stub.ListJobs(management_pb2.ListJobsRequest(), timeout=10.0).jobs
        if jobs and condition(jobs[0]):
            return jobs[0]
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job did not get there within {DEADLINE_SECONDS:g} s")
        time.sleep(0.02)

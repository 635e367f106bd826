"""What management does with what a coordinator says on its stream."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from appliance.management.coordination import Coordination
from appliance.management.jobs import ENDED, JobEntry, JobTable
from appliance.management.nodes.registry import NodeRegistry
from waferbox.host.clock import SystemClock
from wsc.v1 import management_pb2


@pytest.mark.parametrize("phase", sorted(ENDED))
def test_a_job_that_has_ended_is_out_of_the_queue_while_its_coordinator_is_there(
    phase: "management_pb2.JobPhase.ValueType",
) -> None:
    registry = NodeRegistry(5.0, SystemClock(), lambda node, reason: None)
    job = JobEntry(name="job-1", request=management_pb2.CreateJobRequest(priority=2), token="", created=0.0)
    registry.open(job.name)

    async def run() -> None:
        coordination = Coordination(job, JobTable(SystemClock()), registry, SystemClock())

        async def requests() -> AsyncIterator[management_pb2.CoordinateRequest]:
            yield management_pb2.CoordinateRequest(
                acquire=management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)
            )
            assert list(registry.queue_status()) == [job.name]
            report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_QUEUED)
            yield management_pb2.CoordinateRequest(report=report)
            assert list(registry.queue_status()) == [job.name]
            yield management_pb2.CoordinateRequest(report=management_pb2.JobReport(phase=phase))
            assert job.report.phase == phase
            assert not registry.queue_status()

        await coordination.read(requests())

    asyncio.run(run())

"""The progress of a compile, as the session takes it for the line of a script's log."""

import asyncio
from typing import Any

from cstorch._internal.log import SlowWork
from cstorch._internal.session.job_session import JobSession
from wsc.v1 import coordinator_pb2, management_pb2


def test_a_compile_says_its_stage_and_layer() -> None:
    async def run() -> None:
        nothing: Any = None
        created = management_pb2.CreateJobResponse(job="job-1", token="secret")
        session = JobSession(
            created, nothing, nothing, gateway="", may_be_replaced=False, has_cluster_ended=lambda: False
        )
        work = SlowWork("Compiling the step")
        session.compiling = work
        for message, where in (
            (coordinator_pb2.CompileProgress(stage="reading the step"), "reading the step"),
            (coordinator_pb2.CompileProgress(stage="making kernels", done=3, of=96), "making kernels, layer 3 of 96"),
        ):
            session._take(coordinator_pb2.SessionResponse(compiling=message))
            assert work.where == where
        session.compiling = None  # a message may come after the answer
        session._take(coordinator_pb2.SessionResponse(compiling=coordinator_pb2.CompileProgress(stage="late")))

    asyncio.run(run())

"""A client that waits for a compile is sent its stage and layer."""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.compiler.core.progress import Progress, progress
from appliance.coordinator.plans import Plans
from appliance.coordinator.session import ClientSession
from wsc.v1 import coordinator_pb2, plan_pb2

SECONDS = 20.0  # for a thread


def test_the_plans_know_what_the_compiling_thread_does(tmp_path: Path) -> None:
    noted, looked_at = threading.Event(), threading.Event()

    def compile_step(
        cirh: str, num_csx: int, num_shards: int, placed: Mapping[str, int], options: plan_pb2.CompileOptions
    ) -> tuple[str, plan_pb2.Plan, bool]:
        progress("making the wafer's kernels", 3, 8)
        noted.set()
        assert looked_at.wait(SECONDS)
        return "artifact", plan_pb2.Plan(), False

    async def compiled(*arguments: object) -> None:
        pass

    record: Any = SimpleNamespace(plans={}, steps={}, artifacts={}, placed={}, compiled=compiled)
    topology: Any = SimpleNamespace(memoryx=(), wafers=(), state_keepers=())

    async def run() -> None:
        plans = Plans(tmp_path, compile_step, record)
        assert plans.progress is None
        compiling = asyncio.create_task(plans.compile("step", plan_pb2.CompileOptions(), topology, nullcontext))
        assert await asyncio.to_thread(noted.wait, SECONDS)
        assert plans.progress == Progress(stage="making the wafer's kernels", done=3, of=8)
        looked_at.set()
        await compiling
        assert plans.progress is None

    asyncio.run(run())


def test_a_message_is_sent_for_each_change() -> None:
    async def run() -> list[coordinator_pb2.SessionResponse]:
        session = ClientSession(lambda: None, 60.0)
        for found in (None, Progress(stage="a"), Progress(stage="a"), Progress(stage="a", done=1, of=2), None):
            session.send_progress(found)
        session.close()
        return [message async for message in session.messages()]

    sent = asyncio.run(run())
    assert [(each.compiling.stage, each.compiling.done, each.compiling.of) for each in sent] == [
        ("a", 0, 0),
        ("a", 1, 2),
    ]

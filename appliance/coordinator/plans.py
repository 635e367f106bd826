"""The plans of a job: each step is compiled once, and states keep the shard that the first plan gave them."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from appliance.compiler.core.progress import Progress, progress_shown
from appliance.coordinator.compilation import Compile, CompileRefused, report_of
from appliance.coordinator.nodes.topology import Topology
from appliance.coordinator.record import JobRecord
from waferbox.host.event_loop import Changes
from wsc.v1 import coordinator_pb2, plan_pb2

logger = logging.getLogger(__name__)


class Plans:
    """The plans of a job. Used in one event loop; the compiler works in a thread, on one step at a time."""

    def __init__(self, cache: Path, compile_step: Compile, record: JobRecord) -> None:
        """cache: the folder of the artifacts. record: of the job, with the plans of earlier incarnations."""
        self._cache = cache
        self._compile = compile_step
        self._record = record
        self._changes = Changes()
        self._is_busy = False
        self._progress: Progress | None = None  # of the step of `compile`; its thread replaces it
        self._plans = dict(record.plans)
        self._steps = dict(record.steps)  # the requests that the plans were compiled from
        self._artifacts = dict(record.artifacts)  # by the hash of the request
        self._placed = dict(record.placed)  # shard of each placed state, which is final

    async def compile(
        self,
        cirh: str,
        options: plan_pb2.CompileOptions,
        topology: Topology,
        compiling: Callable[[], AbstractContextManager[None]],
    ) -> tuple[str, plan_pb2.Plan, bool]:
        """Returns hash, plan, and whether it came from the cache. Raises as the compiler.

        compiling: a context that is entered while the compiler works.
        """
        request_hash = hashlib.sha256(options.SerializeToString(deterministic=True) + b"\n" + cirh.encode()).digest()
        async with self._alone():
            # The key of the cache depends on the placed states, which now include those of this step.
            if (known := self._artifacts.get(request_hash)) is not None:
                return known, self._plans[known], True
            here = plan_pb2.CompileOptions()
            here.CopyFrom(options)
            here.drops_weights = any(member.node.states_in_files for member in topology.memoryx)
            with compiling(), self._in_progress():
                artifact, plan, cached = await asyncio.to_thread(
                    self._compile, cirh, len(topology.wafers), len(topology.state_keepers), dict(self._placed), here
                )
            logger.info("step %s is %s", artifact, "in the cache" if cached else "compiled")
            self._plans[artifact] = plan
            self._steps[artifact] = coordinator_pb2.CompileRequest(cirh=cirh, options=here)
            for shard, slot in _slots(plan):
                if not slot.replicated:
                    self._placed[slot.name] = shard
            await self._record.compiled(artifact, request_hash, plan, self._steps[artifact], self._placed)
            self._artifacts[request_hash] = artifact
        return artifact, plan, cached

    async def divide(self, num_csx: int, num_shards: int) -> str:
        """Plans all steps for this many wafers; returns the reason if that is impossible, with nothing changed."""
        async with self._alone():
            divided = {}
            for artifact, step in self._steps.items():
                try:
                    _, plan, _ = await asyncio.to_thread(
                        self._compile, step.cirh, num_csx, num_shards, dict(self._placed), step.options
                    )
                except CompileRefused as error:
                    return str(error)
                divided[artifact] = plan
            for artifact, plan in divided.items():
                await self._record.divided(artifact, plan)
            self._plans.update(divided)
        return ""

    @property
    def progress(self) -> Progress | None:
        """What the compiler does for a step; None: it compiles none, or has not begun."""
        return self._progress

    @contextlib.contextmanager
    def _in_progress(self) -> Iterator[None]:
        def keep(progress: Progress) -> None:
            self._progress = progress

        try:
            with progress_shown(keep):
                yield
        finally:
            self._progress = None

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Waits until no other step is compiled: what is placed for one step binds the next."""
        await self._changes.until(lambda: not self._is_busy)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self._changes.notify()

    def __contains__(self, artifact: str) -> bool:
        """Whether this step is compiled."""
        return artifact in self._plans

    def __getitem__(self, artifact: str) -> plan_pb2.Plan:
        """Returns a compiled plan. Raises KeyError for an unknown artifact."""
        return self._plans[artifact]

    def report(self, artifact: str) -> str:
        """Returns the file of an artifact's report; empty if there is none."""
        return report_of(self._cache, artifact)


def placements(plan: plan_pb2.Plan) -> list[coordinator_pb2.StatePlacement]:
    """Returns the shards of a plan's states; a state that every shard keeps is listed once for each."""
    return [coordinator_pb2.StatePlacement(name=slot.name, type=slot.type, shard=shard) for shard, slot in _slots(plan)]


def _slots(plan: plan_pb2.Plan) -> Iterator[tuple[int, plan_pb2.StateSlot]]:
    """Yields all states of a plan, each with its shard; in layer pipelined mode the wafer is the only shard."""
    yield from ((0, slot) for slot in plan.pipeline.states)
    yield from ((shard.shard, slot) for shard in plan.memoryx for slot in shard.states)

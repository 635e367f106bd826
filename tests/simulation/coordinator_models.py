"""Real coordinators in simulated processes: their host, their links and the storage of their records."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from network import Channel, Network, Server
from node_models import MANAGEMENT, EpochModel, Fabric, Work
from values import plan_of
from virtual_time import Process

from appliance.coordinator.compilation import CompileRefused
from appliance.coordinator.execution.output_links import ExpectedLinks
from appliance.coordinator.execution.results import OutputCallbacks
from appliance.coordinator.management_link import ProcessIdentity
from appliance.coordinator.record import RECORD, JobRecord, RecordTaken
from appliance.coordinator.service import CoordinatorService
from appliance.coordinator.serving import CutOff, Event, serve_job
from appliance.coordinator.settings import CUT_OFF_STATUS, CoordinatorSettings
from waferbox import deadlines
from waferbox.links.link import LinkLost
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    ingress_pb2,
    management_pb2,
    node_pb2,
    observation_pb2,
    plan_pb2,
    record_pb2,
)

# --- Records ----------------------------------------------------------------------------------------------------------


class Records:
    """The records of jobs on the disk, which outlive all processes."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # by job and name
        self.holders: dict[str, Process] = {}
        self.is_full = False  # the disk

    @property
    def hellos(self) -> dict[str, management_pb2.CoordinatorHello]:
        """The hellos of all kept records, by job."""
        records = {job: record_pb2.JobRecord.FromString(files[RECORD]) for job, files in self.files.items() if files}
        return {job: record.hello for job, record in records.items() if record.hello.job}


class StoredRecord:
    """The RecordStorage of one coordinator."""

    def __init__(self, records: Records, job: str, process: Process) -> None:
        self._records = records
        self._job = job
        self._process = process

    def make(self) -> None:
        self._records.files[self._job] = {}

    def hold(self) -> None:
        holder = self._records.holders.get(self._job)
        if holder is not None and holder.is_alive and holder is not self._process:
            raise RecordTaken(f"another process holds {self._job}")
        self._records.holders[self._job] = self._process

    def touch(self) -> None:
        pass

    def close(self) -> None:
        if self._records.holders.get(self._job) is self._process:
            del self._records.holders[self._job]

    def read(self, name: str) -> bytes:
        try:
            return self._records.files[self._job][name]
        except KeyError as error:
            raise OSError(f"there is no {name}") from error

    def write(self, name: str, content: bytes) -> None:
        if self._records.is_full or self._job not in self._records.files:
            raise OSError(28, "No space left on device")
        self._records.files[self._job][name] = content

    def remove(self, name: str) -> None:
        self._records.files.get(self._job, {}).pop(name, None)

    def remove_all(self) -> None:
        self._records.files.pop(self._job, None)

    def why_not_kept(self, nbytes: int, reason: str | None) -> str:
        return f"memory: {reason}"


# --- Links ------------------------------------------------------------------------------------------------------------


class OutputsModel:
    """The outputs of an epoch, as a coordinator receives them, and the links before they are open."""

    def __init__(self, fabric: Fabric, process: Process, specs: Sequence[node_pb2.LinkSpec]) -> None:
        self._fabric = fabric
        self._process = process
        self._missing = {spec.token: spec.peer for spec in specs}
        self._peers = set(self._missing.values())
        self._changed = asyncio.Event()
        self._epoch: EpochModel | None = None
        self._waiting: list[coordinator_pb2.StepOutputs] = []
        self._on_outputs: Callable[[float], None] = lambda seconds: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._last = 0.0  # when the last message arrives
        self._is_closed = False
        fabric.outputs.update(dict.fromkeys(self._missing, self))

    # --- the ends at nodes --------------------------------------------------------------------------------------------

    def open(self, token: str, work: Work, epoch: EpochModel) -> None:
        """Opens the link of a node."""
        epoch.outputs = self
        self._epoch = epoch
        self._deliver(self._opened, token)

    def send(self, step: int, tensors: Sequence[bytes]) -> None:
        """Sends the outputs of a step."""
        self._deliver(self._received, coordinator_pb2.StepOutputs(step=step, tensors=tensors))

    def lose(self, peer: str) -> None:
        """Closes the link of a node."""
        if peer in self._peers:
            self._deliver(self._lost, peer)

    def _deliver(self, receive: Callable[..., None], *arguments: object) -> None:
        world = self._fabric.world
        self._last = max(self._last, world.now) + self._fabric.network.latency()
        self._process.loop.arrive_at(self._last, receive, *arguments)

    def _opened(self, token: str) -> None:
        self._missing.pop(token, None)
        self._changed.set()

    def _received(self, outputs: coordinator_pb2.StepOutputs) -> None:
        if not self._is_closed:
            self._waiting.append(outputs)
            self._on_outputs(0.0)

    def _lost(self, peer: str) -> None:
        if not self._is_closed:
            self._on_failure(LinkLost(peer, "it has closed the link"))

    # --- as ExpectedLinks ---------------------------------------------------------------------------------------------

    async def wait(self, plan: plan_pb2.Plan, schedule: StepSchedule, callbacks: OutputCallbacks) -> "OutputsModel":
        self._on_outputs, self._on_failure = callbacks.on_outputs, callbacks.on_failure
        try:
            async with asyncio.timeout(deadlines.LINKS.coordinator):
                while self._missing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise LinkLost(next(iter(self._missing.values())), "it did not connect") from error
        return self

    # --- as Outputs ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        pass

    def take(self) -> coordinator_pb2.OutputBatch | None:
        taken, self._waiting = self._waiting, []
        return coordinator_pb2.OutputBatch(steps=taken) if taken else None

    def consumed(self, step: int) -> None:
        epoch = self._epoch
        if epoch is not None:

            def acknowledge() -> None:
                epoch.consumed = max(epoch.consumed, step)

            self._fabric.world.after(self._fabric.network.latency(), acknowledge)

    async def close(self) -> None:
        self._is_closed = True


class _ExpectedLinks:
    def __init__(self, outputs: OutputsModel) -> None:
        self.open = outputs.wait

    def close(self) -> None:
        pass


class LinksModel:
    """The links of a coordinator."""

    def __init__(self, fabric: Fabric, process: Process) -> None:
        self._fabric = fabric
        self._process = process

    def endpoint(self) -> node_pb2.LinkEndpoint:
        return node_pb2.LinkEndpoint(address=self._process.name)

    def expect(self, specs: Sequence[node_pb2.LinkSpec]) -> ExpectedLinks:
        return _ExpectedLinks(OutputsModel(self._fabric, self._process, specs))


# --- Coordinators -----------------------------------------------------------------------------------------------------


def compile_step(
    cirh: str, num_csx: int, num_shards: int, placed: Mapping[str, int], options: plan_pb2.CompileOptions
) -> tuple[str, plan_pb2.Plan, bool]:
    if cirh == "refused":
        raise CompileRefused("no rule for this step")
    return f"artifact-{cirh}", plan_of(cirh, num_csx, num_shards), False


class SimulatedCoordinator:
    """A real coordinator in a simulated process; the CoordinatorHost of it."""

    def __init__(
        self,
        fabric: Fabric,
        request: ingress_pb2.RunCoordinatorRequest,
        records: Records,
        ingress: str,
        cache_root: Path,
    ) -> None:
        """ingress: that runs it; empty: management does."""
        self.job = request.job
        self.process = Process(fabric.world, f"coordinator-{request.job}", host="host-1" if ingress else "host-0")
        self.address = f"{self.process.name}:{self.process.pid}"
        self.identity = ProcessIdentity(process_id=self.process.pid, process_started=1, host=self.process.host)
        self.clock = self.process
        self.links = LinksModel(fabric, self.process)
        self.service: CoordinatorService | None = None
        self._network: Network = fabric.network
        self._records = records
        self._settings = CoordinatorSettings(
            job=request.job,
            token=request.token,
            created=request.created,
            management=MANAGEMENT,
            listen="",
            cache=cache_root,
            cache_root=cache_root,
            terminated="its cluster went down",
            ingress=ingress,
            restarted=request.restarted,
            may_restart=request.may_restart,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._server: Server | None = None
        self.process.start(self._run)

    @property
    def had_hello(self) -> bool:
        """Whether management has answered it."""
        return self.service is not None

    @property
    def is_connected(self) -> bool:
        """Whether it has a stream on which management has answered."""
        return self.service is not None and not self.service.job._management._lost

    @property
    def end(self) -> management_pb2.JobReport | None:
        """Its last report, if it has made one."""
        if self.service is None:
            return None
        reporter = self.service.job._reporter
        return reporter._report if reporter._is_over else None

    def terminate(self) -> None:
        if self._settings.may_restart:
            self.process.kill()
        else:
            self._events.put_nowait(Event.TERMINATE)

    async def _run(self) -> int:
        record = JobRecord(StoredRecord(self._records, self.job, self.process))
        try:
            return await serve_job(self._settings, compile_step, self._events, self, record)  # type: ignore[arg-type]
        except CutOff:
            return CUT_OFF_STATUS

    # --- as CoordinatorHost -------------------------------------------------------------------------------------------

    def open_channel(self, address: str) -> grpc.aio.Channel:
        return Channel(self._network, self.process, address)  # type: ignore[return-value]

    def process_report(self, node: str) -> observation_pb2.NodeReport:
        return observation_pb2.NodeReport(node=node, time=self.clock.time_ns() / 1e9)

    def oom_kills(self) -> int:
        return 0

    async def is_listening(self, address: str) -> bool:
        await asyncio.sleep(self._network.latency())
        server = self._network.servers.get(address)
        return server is not None and server.process.is_alive

    def is_running(self, process_id: int, process_started: int) -> bool:
        processes = self.process.world.processes
        return any(each.pid == process_id and each.is_alive for each in processes)

    async def serve(self, service: CoordinatorService) -> None:
        self.service = service
        self._server = Server(self._network, self.process, self.address)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, self._server)  # type: ignore[arg-type]

    async def stop(self, grace_seconds: float) -> None:
        await asyncio.sleep(0.1)
        if self._server is not None:
            self._server.close()

"""Models of nodes: they answer the coordinator of their job as real ones do, and run its steps together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

import grpc
from network import Channel, Context, Network, Server
from tokens_shown import shown
from values import EVALUATE, TRAIN, States, after_step, batch, metric, output_of
from virtual_time import Process, World

from waferbox import __version__, deadlines, roles
from waferbox.runtime.schedule import StepSchedule
from waferbox.security.guard import caller_of
from waferbox.security.tokens import Kind
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2, node_pb2_grpc, observation_pb2, plan_pb2

if TYPE_CHECKING:
    from coordinator_models import OutputsModel

MANAGEMENT: Final = "management:9000"
COORDINATOR: Final = roles.COORDINATOR.name
REPORT_SECONDS: Final = (5.0, 1.0)  # of a node, and of a state keeper, from which the pace follows


async def keep_registered(network: Network, process: Process, hello: "Hello") -> None:
    """Registers with management, and again whenever the stream ends."""

    async def heartbeats() -> AsyncIterator[management_pb2.RegisterRequest]:
        is_first = True
        while True:
            yield hello.message(is_first=is_first)
            is_first = False
            await asyncio.sleep(deadlines.REGISTRATION.lease / deadlines.REGISTRATION.heartbeats_per_lease)

    while True:
        channel = Channel(network, process, MANAGEMENT, shown(Kind.NODE))
        stub = management_pb2_grpc.ManagementStub(channel)  # type: ignore[arg-type]
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in stub.Register(heartbeats()):  # type: ignore[call-overload]
                pass
        await channel.close()
        await asyncio.sleep(deadlines.REGISTRATION.retry)


class Hello:
    """The messages of a registration."""

    def message(self, *, is_first: bool) -> management_pb2.RegisterRequest:
        """Returns the next message. is_first: whether it is the first of a registration."""
        raise NotImplementedError


# --- What nodes have in common ----------------------------------------------------------------------------------------


class Fabric:
    """The links between nodes, and the disks of their hosts."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.world: World = network.world
        self.nodes: list[NodeModel] = []
        self.epochs: dict[tuple[str, int], EpochModel] = {}  # by job and number
        self.outputs: dict[str, OutputsModel] = {}  # which a coordinator expects, by the token of the link
        # The shares of recovery points, by host, job, member and number; they outlive the processes of the host.
        self.disks: dict[tuple[str, str, str, int], States] = {}
        self.full_hosts: set[str] = set()  # whose disks have no room

    def epoch(self, job: str, epoch: int) -> "EpochModel":
        return self.epochs.setdefault((job, epoch), EpochModel(self, job, epoch))

    def at(self, address: str) -> "NodeModel | None":
        """Returns the living node at an address."""
        return next((node for node in self.nodes if node.address == address and node.process.is_alive), None)


class EpochModel:
    """An epoch that nodes run together: a step is done on all of them, or on none."""

    def __init__(self, fabric: Fabric, job: str, epoch: int) -> None:
        self._fabric = fabric
        self._world = fabric.world
        self.job = job
        self.number = epoch
        self.loaded: dict[str, Work] = {}  # by member
        self.peers: dict[str, set[str]] = {}  # the members at the other ends of a member's links
        self._started: dict[str, node_pb2.Start] = {}
        self.outputs: OutputsModel | None = None
        self.consumed = 0  # the last step that the client has consumed, as far as the nodes know
        self.step = 0
        self._sent: list[int] = []  # the steps whose outputs the client has not consumed, as far as the nodes know
        self._seconds = self._world.random.choice([0.02, 0.1, 0.4])  # of a step
        self._is_broken = False

    def load(self, work: "Work", peers: set[str]) -> None:
        self.loaded[work.name] = work
        self.peers[work.name] = peers

    def is_linked(self, work: "Work") -> bool:
        """Whether all links of a member can be opened."""
        return all(peer in self.loaded and self.loaded[peer].is_alive for peer in self.peers[work.name])

    def start(self, work: "Work", start: node_pb2.Start) -> None:
        self._started[work.name] = start
        if self._started.keys() >= self.loaded.keys():
            self.step = start.done_steps
            schedule = StepSchedule.from_start(start)
            if schedule.num_steps:
                self._world.after(self._seconds, self._run, schedule)
            for member in [] if schedule.num_steps else list(self.loaded.values()):
                member.finish(self.number)

    def leave(self, work: "Work", *, by_stop: bool) -> None:
        """Ends the epoch on a member. The others lose their links to it."""
        if self.loaded.get(work.name) is not work:
            return
        del self.loaded[work.name]
        if self.outputs is not None:
            self.outputs.lose(work.name)
        for name, other in self.loaded.items():
            if work.name in self.peers[name] and (self._started or self._is_broken or not by_stop):
                self._world.after(self._fabric.network.latency(), other.lose_link, work.name, self.number)
        self._is_broken = True

    def _run(self, schedule: StepSchedule) -> None:
        """Does a step, if all members live and the client is not too far behind."""
        if self._is_broken:
            return
        works = list(self.loaded.values())
        dead = [work for work in works if not work.is_alive]
        for work in dead:
            self.leave(work, by_stop=False)
        if dead:
            return
        step = self.step + 1
        for work in works:
            work.report_if_due(self.number, self.step)
        waiting = sum(sent > self.consumed for sent in self._sent)
        is_held = schedule.outputs_leave(step - schedule.done_steps) and waiting >= schedule.run_ahead_steps
        if is_held or any(work.is_stalled for work in works):
            self._world.after(0.1, self._run, schedule)
            return
        self._do_step(step, schedule, works)
        if step < schedule.num_steps + schedule.done_steps:
            self._world.after(self._seconds, self._run, schedule)

    def _do_step(self, step: int, schedule: StepSchedule, works: "list[Work]") -> None:
        self.step = step
        local = step - schedule.done_steps
        inputs = [work.next_batch() for work in works if work.role == node_pb2.ROLE_WORKER]
        keepers = [work for work in works if work.role == node_pb2.ROLE_MEMORYX]
        states = {name: value for keeper in keepers for name, value in keeper.loaded_states().items()}
        assert len(inputs) == sum(work.role == node_pb2.ROLE_WAFER for work in works), "a wafer has no worker"
        assert len(set(inputs)) == 1, "the workers are at different batches"
        if schedule.outputs_leave(local) and self.outputs is not None:
            self.outputs.send(step, [output_of(states, inputs[0])])
            self._sent = [sent for sent in self._sent if sent > self.consumed] + [step]
        kind = keepers[0].step_kind
        changed = after_step(kind, states, inputs[0])
        for keeper in keepers:
            keeper.states.update((name, changed[name]) for name in keeper.loaded_states())
            if schedule.keeps_snapshot(local):
                keeper.keep_snapshot(step)
        for work in works:
            work.step_done(self.number, step, is_last=local == schedule.num_steps)


# --- Nodes ------------------------------------------------------------------------------------------------------------


class Work:
    """The work of a node for one job."""

    def __init__(self, fabric: Fabric, node: "NodeModel", attach: node_pb2.AttachJob) -> None:
        self.name, self.index, self.job = attach.node, attach.index, attach.job
        self.role = node.role
        self.states: States = {}  # of a state keeper
        self.snapshots: dict[int, States] = {}
        self.step_kind = TRAIN
        self.responses: asyncio.Queue[node_pb2.AttachResponse] = asyncio.Queue()
        self._fabric = fabric
        self._node = node
        self._random = fabric.world.random
        self._plan = plan_pb2.MemoryXPlan()
        self._loaders: set[str] = set()
        self._loader, self._position = "", 0
        self._state_steps: set[int] = set()
        self._epoch: EpochModel | None = None
        self._due: node_pb2.KeepRecoveryPoint | None = None
        self._last_point = 0
        self._loading: asyncio.Task[None] | None = None
        self._reported = 0.0

    @property
    def is_alive(self) -> bool:
        return self._node.process.is_alive and self._node.work is self

    @property
    def is_stalled(self) -> bool:
        return self._node.process.stalled_until > self._fabric.world.now

    def emit(self, **kind: object) -> None:
        if self.is_alive:
            self.responses.put_nowait(node_pb2.AttachResponse(**kind))  # type: ignore[arg-type]

    def fail(self, kind: "node_pb2.Failure.Kind.ValueType", message: str, peer: str = "") -> None:
        self.emit(failed=node_pb2.Failure(kind=kind, node=self.name, message=message, peer=peer))

    # --- commands of the coordinator ----------------------------------------------------------------------------------

    def handle(self, request: node_pb2.AttachRequest) -> None:
        match request.WhichOneof("kind"):
            case "attach":
                self.emit(attached=node_pb2.Attached(endpoint=node_pb2.LinkEndpoint(address=self._node.address)))
            case "prepare_input":
                self._loaders.add(request.prepare_input.loader)
            case "load":
                self._leave()
                self._loading = asyncio.create_task(self._load(request.load))
            case "start":
                self._start(request.start)
            case "stop":
                self._leave()
                self.emit(stopped=node_pb2.Stopped(epoch=request.stop.epoch))
            case "release_snapshot":
                self.snapshots.pop(request.release_snapshot.step, None)
            case "keep_recovery_point":
                self._keep_after(request.keep_recovery_point)
            case "drop_recovery_points":
                self._drop(request.drop_recovery_points.before)
            case "copy_recovery_point":
                seconds = self._random.uniform(0.01, 0.5)
                asyncio.get_running_loop().call_later(seconds, self._copy, request.copy_recovery_point)

    def close(self) -> None:
        """Ends the work, with its states."""
        self._leave()

    def _leave(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        if self._epoch is not None:
            self._epoch.leave(self, by_stop=True)
        self._epoch = self._due = None

    async def _load(self, load: node_pb2.Load) -> None:
        if load.HasField("memoryx"):
            self._plan = load.memoryx
        self.step_kind = TRAIN
        if any(slot.name == metric(self.index) for slot in self._plan.states):
            self.step_kind = EVALUATE
        if load.recovery_point and not await self._restore(load):
            return
        if self.role == node_pb2.ROLE_WORKER:
            if load.loader not in self._loaders:
                self.fail(node_pb2.Failure.KIND_INTERNAL, f"{self.name} has no input {load.loader}")
                return
            self._loader, self._position = load.loader, load.done_steps
            self._state_steps = set(load.state_steps)
            for state in load.input_states[self.index : self.index + 1]:
                loader, _, position = state.decode().rpartition(":")
                assert loader == load.loader, "the state of a loader is that of another"
                self._position = int(position)
        if load.links:
            epoch = self._epoch = self._fabric.epoch(self.job, load.epoch)
            epoch.load(self, {spec.peer for spec in load.links if spec.peer != COORDINATOR})
            end = self._fabric.world.now + deadlines.LINKS.open
            while not epoch.is_linked(self):
                if self._fabric.world.now >= end:
                    missing = next(peer for peer in epoch.peers[self.name] if peer not in epoch.loaded)
                    self.fail(node_pb2.Failure.KIND_NODE, f"the link to {missing} is lost", peer=missing)
                    return
                await asyncio.sleep(0.05)
            for spec in load.links:
                outputs = self._fabric.outputs.get(spec.token)
                if spec.peer == COORDINATOR and outputs is not None:
                    outputs.open(spec.token, self, epoch)
        await asyncio.sleep(self._random.uniform(0.005, 0.3))
        missing_states = [slot.name for slot in self._plan.states if slot.name not in self.states]
        self.emit(loaded=node_pb2.Loaded(epoch=load.epoch, missing_states=missing_states))

    async def _restore(self, load: node_pb2.Load) -> bool:
        """Restores a recovery point from the disk of the host, or a copy; False if there is neither."""
        await asyncio.sleep(self._random.uniform(0.005, 0.3))
        disks, key = self._fabric.disks, (self.job, self.name, load.recovery_point)
        own = (self._node.process.host, *key)
        if own not in disks:
            for address in load.copies_at:
                other = self._fabric.at(address)
                if other is not None and (other.process.host, *key) in disks:
                    disks[own] = disks[other.process.host, *key]
        if own not in disks:
            self.fail(node_pb2.Failure.KIND_INTERNAL, f"{self.name} finds no share of point {load.recovery_point:x}")
            return False
        self.states = dict(disks[own])
        self._emit_kept(load.recovery_point)
        return True

    def _start(self, start: node_pb2.Start) -> None:
        assert self._epoch is not None, "an epoch is started that is not loaded"
        assert self._epoch.number == start.epoch, "another epoch is started than was loaded"
        self._last_point = start.last_recovery_point
        if start.recovery_point:
            self._write_share(start.recovery_point)
        self._epoch.start(self, start)

    # --- steps --------------------------------------------------------------------------------------------------------

    def loaded_states(self) -> Mapping[str, bytes]:
        """Returns the states of the step that is loaded."""
        return {slot.name: self.states[slot.name] for slot in self._plan.states}

    def next_batch(self) -> bytes:
        self._position += 1
        return batch(self._loader, self._position)

    def keep_snapshot(self, step: int) -> None:
        self.snapshots[step] = dict(self.states)
        self.emit(snapshot=node_pb2.Snapshot(step=step))

    def step_done(self, epoch: int, step: int, *, is_last: bool) -> None:
        """Does what follows a step."""
        due = self._due
        if due is not None and step >= due.step:
            self._due = None
            if step == due.step and self.role == node_pb2.ROLE_MEMORYX:
                self._write_share(due.recovery_point)
        if self.role == node_pb2.ROLE_WORKER and (step in self._state_steps or (due is not None and step == due.step)):
            state = f"{self._loader}:{self._position}".encode()
            self.emit(input_state=node_pb2.InputState(epoch=epoch, step=step, state=state))
        if is_last:
            self.finish(epoch)

    def finish(self, epoch: int) -> None:
        """Ends the steps of an epoch."""
        self.emit(finished=node_pb2.Finished(epoch=epoch))
        if self._last_point and self.role == node_pb2.ROLE_MEMORYX:
            self._write_share(self._last_point)

    def report_if_due(self, epoch: int, step: int) -> None:
        """Reports progress now and then."""
        now = self._fabric.world.now
        if now - self._reported >= REPORT_SECONDS[self.role == node_pb2.ROLE_MEMORYX]:
            self._reported = now
            report = observation_pb2.NodeReport(
                node=self.name, epoch=epoch, step=step, time=self._node.process.time_ns() / 1e9, seconds={"total": now}
            )
            self.emit(events=observation_pb2.JobEvents(events=[observation_pb2.JobEvent(report=report)]))

    def lose_link(self, peer: str, epoch: int) -> None:
        """Reports a lost link of an epoch, unless the coordinator has ended it."""
        if self._epoch is not None and self._epoch.number == epoch:
            self.fail(node_pb2.Failure.KIND_NODE, f"the link to {peer} is lost", peer=peer)

    # --- recovery points ----------------------------------------------------------------------------------------------

    def _keep_after(self, keep: node_pb2.KeepRecoveryPoint) -> None:
        if self._epoch is not None and self._epoch.number == keep.epoch and self._epoch.step < keep.step:
            self._due = keep

    def _write_share(self, point: int) -> None:
        """Writes a share of the present states; it is on the disk a while later."""
        states = dict(self.states)

        def written() -> None:
            host = self._node.process.host
            if not self.is_alive:
                return
            if host in self._fabric.full_hosts:
                self.emit(recovery_point_kept=node_pb2.RecoveryPointKept(recovery_point=point, given_up=True))
                return
            self._fabric.disks[host, self.job, self.name, point] = states
            self._emit_kept(point)

        self._node.process.loop.call_later(self._random.choice([0.01, 0.2, 2.0]), written)

    def _emit_kept(self, point: int) -> None:
        kept = node_pb2.RecoveryPointKept(recovery_point=point, folder=self._node.process.host, nbytes=8)
        self.emit(recovery_point_kept=kept)

    def _drop(self, before: int) -> None:
        disks, host = self._fabric.disks, self._node.process.host
        for key in [key for key in disks if key[:2] == (host, self.job) and key[3] < before]:
            del disks[key]

    def _copy(self, copy: node_pb2.CopyRecoveryPoint) -> None:
        if not self.is_alive:
            return
        owner, key = self._fabric.at(copy.address), (self.job, copy.member, copy.recovery_point)
        share = None if owner is None else self._fabric.disks.get((owner.process.host, *key))
        if share is not None:
            self._fabric.disks[self._node.process.host, *key] = share
        copied = node_pb2.RecoveryPointCopied(
            recovery_point=copy.recovery_point, member=copy.member, given_up=share is None
        )
        self.emit(recovery_point_copied=copied)


class NodeModel(node_pb2_grpc.NodeServiceServicer, Hello):
    """A node: registers, renews its lease, and works for one job at a time."""

    def __init__(
        self, fabric: Fabric, name_number: int, role: "node_pb2.Role.ValueType", address: str, host: str
    ) -> None:
        module = roles.role_of(role).module
        network = fabric.network
        self.process = Process(network.world, f"{module}-node-{name_number}", host)
        self.role = role
        self.address = address
        self.attached: node_pb2.AttachJob | None = None
        self.work: Work | None = None
        self._fabric = fabric
        self._lease = 0  # time of the last
        self._instance = ""
        self._instances = 0
        server = Server(network, self.process, address)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, server)  # type: ignore[arg-type]
        self._free = asyncio.Lock()
        self.process.start(self._run)

    async def _run(self) -> int:
        await keep_registered(self._fabric.network, self.process, self)
        return 0

    def message(self, *, is_first: bool) -> management_pb2.RegisterRequest:
        if is_first:
            self._instances += 1
            self._instance = f"{self.process.pid}-{self._instances}"
        attached = self.attached or node_pb2.AttachJob()
        return management_pb2.RegisterRequest(
            role=self.role,
            address=self.address,
            host=self.process.host,
            version=__version__,
            process_id=self.process.pid,
            instance=self._instance,
            job=attached.job,
            member=attached.node,
        )

    async def Attach(
        self, request_iterator: AsyncIterator[node_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[node_pb2.AttachResponse]:
        caller = caller_of(context.invocation_metadata())
        assert caller is not None
        job, instance, time_ns = caller.names
        if instance != self._instance or int(time_ns) < self._lease:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this lease is not of this node, or an old one")
        self._lease = int(time_ns)
        try:
            async with asyncio.timeout(deadlines.ATTACHMENT.previous_job):
                await self._free.acquire()
        except TimeoutError:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this node works for another job")
        try:
            first = await anext(request_iterator, None)
            if first is None:
                return
            assert first.attach.job == job
            self.attached = first.attach
            work = self.work = Work(self._fabric, self, first.attach)
            reading = asyncio.create_task(self._read(work, first, request_iterator))
            try:
                while (response := await work.responses.get()).WhichOneof("kind") is not None:
                    yield response
            finally:
                reading.cancel()
                work.close()
        finally:
            self.attached = self.work = None
            self._free.release()

    async def _read(
        self, work: Work, first: node_pb2.AttachRequest, requests: AsyncIterator[node_pb2.AttachRequest]
    ) -> None:
        work.handle(first)
        async for request in requests:
            work.handle(request)
        work.responses.put_nowait(node_pb2.AttachResponse())  # the end

    # --- the states, as clients read and write them -------------------------------------------------------------------

    def read(self, job: str, names: list[str], step: int) -> States:
        """Returns states, or those of a snapshot. Raises KeyError, as a client must look for them elsewhere."""
        if self.work is None or self.work.job != job:
            raise KeyError(job)
        states = self.work.snapshots[step] if step else self.work.states
        return {name: states[name] for name in names}

    def write(self, job: str, states: States) -> None:
        """Writes states. Raises KeyError as read."""
        if self.work is None or self.work.job != job:
            raise KeyError(job)
        self.work.states.update(states)

"""Models of nodes: they answer the coordinator of their job as real ones do, and run its steps together."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import grpc
from network import Channel, Network, Server
from values import EVALUATE, NO_INPUT, TRAIN, States, after_step, bad_step_of, batch, metric, output_of
from virtual_time import Process, World

from waferbox import deadlines, roles
from waferbox.host.threads import CancellationToken
from waferbox.links.hub import ANY_PEER
from waferbox.links.link import LinkLost
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.node_service import Emit, NodeService
from waferbox.runtime.registration import Registration
from waferbox.runtime.role_job import failure_of
from waferbox.runtime.schedule import StepSchedule
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, node_pb2, node_pb2_grpc, observation_pb2, plan_pb2

if TYPE_CHECKING:
    from coordinator_models import OutputsModel

MANAGEMENT: Final = "management:9000"
CONNECTION_SECONDS: Final = 20.0  # gRPC's limit for the opening of a connection
COORDINATOR: Final = roles.COORDINATOR.name


def registration_of(
    network: Network,
    process: Process,
    hello: Callable[[], management_pb2.RegisterRequest],
    on_job_ended: Callable[[str], None] | None = None,
) -> Registration:
    """The registration of a simulated process."""

    def open_channel(address: str) -> grpc.aio.Channel:
        return Channel(network, process, address)  # type: ignore[return-value]

    return Registration(MANAGEMENT, hello, process.world.defects.append, open_channel, on_job_ended)


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
        self.is_running = False
        self._sent: list[int] = []  # the steps whose outputs the client has not consumed, as far as the nodes know
        self._seconds = self._world.random.choice([0.02, 0.1, 0.4])  # of a step
        self._has_no_input = False
        self._is_broken = False
        self.lacks_frame = False  # so that all members wait for each other

    def load(self, work: "Work", peers: set[str]) -> None:
        self.loaded[work.name] = work
        self.peers[work.name] = peers

    def is_linked(self, work: "Work") -> bool:
        """Whether all links of a member can be opened."""
        return all(peer in self.loaded and self.loaded[peer].is_alive for peer in self.peers[work.name])

    def start(self, work: "Work", start: node_pb2.Start) -> None:
        self._started[work.name] = start
        if self._started.keys() >= self.loaded.keys():
            self.is_running = True
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
        waiting = sum(sent > self.consumed for sent in self._sent)
        is_held = schedule.outputs_leave(step - schedule.done_steps) and waiting >= schedule.run_ahead_steps
        if is_held or any(work.is_stalled for work in works):
            self._world.after(0.1, self._run, schedule)
            return
        if bad := [work for work in works if work.has_bad_batch()]:
            if not self._has_no_input:  # some workers report it, in any order
                for work in self._world.random.sample(bad, self._world.random.randint(1, len(bad))):
                    work.fail_input(step)
            self._has_no_input = True
            self._world.after(0.1, self._run, schedule)
            return
        if self.lacks_frame:
            return  # all nodes wait for it
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
    """The work of a node for one job, as an AttachedJob."""

    def __init__(self, fabric: Fabric, node: "NodeModel", attach: node_pb2.AttachJob, emit: Emit) -> None:
        self.name, self.index, self.job = attach.node, attach.index, attach.job
        self.role = node.role
        self.states: States = {}  # of a state keeper
        self.snapshots: dict[int, States] = {}
        self.step_kind = TRAIN
        self._emit = emit
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

    @property
    def is_alive(self) -> bool:
        return self._node.process.is_alive and self._node.work is self

    @property
    def is_stalled(self) -> bool:
        return self._node.process.stalled_until > self._fabric.world.now

    def emit(self, **kind: object) -> None:
        if self.is_alive:
            self._emit(node_pb2.AttachResponse(**kind))  # type: ignore[arg-type]

    # --- as AttachedJob -----------------------------------------------------------------------------------------------

    def report(self) -> observation_pb2.NodeReport | None:
        if self._epoch is None or not self._epoch.is_running:
            return None
        now = self._fabric.world.now
        return observation_pb2.NodeReport(
            node=self.name,
            epoch=self._epoch.number,
            step=self._epoch.step,
            time=self._node.process.time_ns() / 1e9,
            seconds={"total": now},
            waits_for="" if self.has_bad_batch() else ANY_PEER,
        )

    def check_progress(self) -> None:
        """Does nothing: steps of the model do not hang."""

    async def execute(
        self, command: node_pb2.AttachRequest, cancellation: CancellationToken
    ) -> node_pb2.AttachResponse | None:
        match command.WhichOneof("kind"):
            case "prepare_input":
                self._loaders.add(command.prepare_input.loader)
            case "load":
                return await self._load(command.load, cancellation)
            case "start":
                self._start(command.start)
            case "stop":
                self._leave()
                return node_pb2.AttachResponse(stopped=node_pb2.Stopped(epoch=command.stop.epoch))
            case "release_snapshot":
                self.snapshots.pop(command.release_snapshot.step, None)
            case "keep_recovery_point":
                self._keep_after(command.keep_recovery_point)
            case "drop_recovery_points":
                self._drop(command.drop_recovery_points.before)
            case "copy_recovery_point":
                seconds = self._random.uniform(0.01, 0.5)
                asyncio.get_running_loop().call_later(seconds, self._copy, command.copy_recovery_point)
        return None

    async def close(self) -> None:
        self._leave()
        self._node.work = None

    def _leave(self) -> None:
        if self._epoch is not None:
            self._epoch.leave(self, by_stop=True)
        self._epoch = self._due = None

    async def _load(self, load: node_pb2.Load, cancellation: CancellationToken) -> node_pb2.AttachResponse:
        self._leave()
        if load.HasField("memoryx"):
            self._plan = load.memoryx
        self.step_kind = TRAIN
        if any(slot.name == metric(self.index) for slot in self._plan.states):
            self.step_kind = EVALUATE
        if load.recovery_point:
            await self._restore(load, cancellation)
        if self.role == node_pb2.ROLE_WORKER:
            self._set_input(load)
        if load.links:
            await self._open_links(load, cancellation)
        await asyncio.sleep(self._random.uniform(0.005, 0.3))
        missing_states = [slot.name for slot in self._plan.states if slot.name not in self.states]
        return node_pb2.AttachResponse(loaded=node_pb2.Loaded(epoch=load.epoch, missing_states=missing_states))

    def _set_input(self, load: node_pb2.Load) -> None:
        if load.loader not in self._loaders:
            raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.name} has no input {load.loader}")
        self._loader, self._position = load.loader, load.done_steps
        self._state_steps = set(load.state_steps)
        for state in load.input_states[self.index : self.index + 1]:
            loader, _, position = state.decode().rpartition(":")
            assert loader == load.loader, "the state of a loader is that of another"
            self._position = int(position)

    async def _open_links(self, load: node_pb2.Load, cancellation: CancellationToken) -> None:
        epoch = self._epoch = self._fabric.epoch(self.job, load.epoch)
        epoch.load(self, {spec.peer for spec in load.links if spec.peer != COORDINATOR})
        end = self._fabric.world.now + deadlines.LINKS.open
        while not epoch.is_linked(self):
            if self._fabric.world.now >= end or cancellation.cancelled:
                missing = next(peer for peer in epoch.peers[self.name] if peer not in epoch.loaded)
                raise LinkLost(missing, "it did not connect")
            await asyncio.sleep(0.05)
        for spec in load.links:
            outputs = self._fabric.outputs.get(spec.token)
            if spec.peer == COORDINATOR and outputs is not None:
                outputs.open(spec.token, self, epoch)

    async def _restore(self, load: node_pb2.Load, cancellation: CancellationToken) -> None:
        """Restores a recovery point from the disk of the host, or a copy."""
        await asyncio.sleep(self._random.uniform(0.005, 0.3))
        disks, key = self._fabric.disks, (self.job, self.name, load.recovery_point)
        own = (self._node.process.host, *key)
        is_refused = True  # by all, so that it is no use to ask again
        for address in load.copies_at if own not in disks else ():
            server = self._fabric.network.servers.get(address)
            if server is not None and server.process.has_vanished:
                await self._await_connection(cancellation)
                is_refused = False
            elif (other := self._fabric.at(address)) is None or other.work is None or other.work.job != self.job:
                is_refused = False
            elif (other.process.host, *key) in disks:
                disks[own] = disks[other.process.host, *key]
                break
        if own not in disks:
            message = f"recovery point {load.recovery_point:x} of {self.name} cannot be read"
            kind = node_pb2.Failure.KIND_USER if is_refused else node_pb2.Failure.KIND_NODE
            raise JobFailure(kind, message)
        self.states = dict(disks[own])
        self._emit_kept(load.recovery_point)

    async def _await_connection(self, cancellation: CancellationToken) -> None:
        """Waits for the answer of a host that has vanished, as long as gRPC does."""
        end = self._fabric.world.now + CONNECTION_SECONDS
        while self._fabric.world.now < end and not cancellation.cancelled:
            await asyncio.sleep(0.05)

    def _start(self, start: node_pb2.Start) -> None:
        assert self._epoch is not None, "an epoch is started that is not loaded"
        assert self._epoch.number == start.epoch, "another epoch is started than was loaded"
        self._last_point = start.last_recovery_point
        if start.recovery_point and self.role == node_pb2.ROLE_MEMORYX:
            self._write_share(start.recovery_point)
        self._epoch.start(self, start)

    # --- steps --------------------------------------------------------------------------------------------------------

    def loaded_states(self) -> Mapping[str, bytes]:
        """Returns the states of the step that is loaded."""
        return {slot.name: self.states[slot.name] for slot in self._plan.states}

    def next_batch(self) -> bytes:
        self._position += 1
        return batch(self._loader, self._position)

    def has_bad_batch(self) -> bool:
        """Whether this is a worker whose loader cannot make the next batch."""
        return self.role == node_pb2.ROLE_WORKER and self._position + 1 == bad_step_of(self._loader)

    def fail_input(self, step: int) -> None:
        """Reports that there is no batch for a step."""
        failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_INPUT, node=self.name, message=NO_INPUT, step=step)
        self.emit(failed=failure)

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

    def lose_link(self, peer: str, epoch: int) -> None:
        """Reports a lost link of an epoch, unless the coordinator has ended it."""
        if self._epoch is not None and self._epoch.number == epoch:
            self.emit(failed=failure_of(self.name, LinkLost(peer, "it is lost")))

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


class NodeModel:
    """A node: the real registration and service, with a model of its work."""

    def __init__(
        self, fabric: Fabric, name_number: int, role: "node_pb2.Role.ValueType", address: str, host: str
    ) -> None:
        module = roles.role_of(role).module
        network = fabric.network
        self.process = Process(network.world, f"{module}-node-{name_number}", host)
        self.role = role
        self.address = address
        self.work: Work | None = None
        self._fabric = fabric
        self._registration = registration_of(network, self.process, self._hello, self._job_ended)
        self.service = NodeService(
            self._make_job, self._endpoint, lambda: self._registration.instance, network.world.defects.append
        )
        server = Server(network, self.process, address)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self.service, server)  # type: ignore[arg-type]
        self.process.start(self._run)

    async def _run(self) -> int:
        self._registration.start()
        await asyncio.get_running_loop().create_future()
        return 0

    def _endpoint(self) -> node_pb2.LinkEndpoint:
        return node_pb2.LinkEndpoint(address=self.address)

    def _make_job(self, attach: node_pb2.AttachJob, emit: Emit) -> Work:
        self.work = Work(self._fabric, self, attach, emit)
        return self.work

    def _job_ended(self, job: str) -> None:
        """Removes the recovery points of a job that has ended."""
        disks = self._fabric.disks
        for key in [key for key in disks if key[:2] == (self.process.host, job)]:
            del disks[key]

    def _hello(self) -> management_pb2.RegisterRequest:
        return management_pb2.RegisterRequest(
            role=self.role,
            address=self.address,
            host=self.process.host,
            version=WIRE_VERSION,
            process_id=self.process.pid,
            job=self.service.attached_job.job,
            member=self.service.attached_job.node,
        )

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

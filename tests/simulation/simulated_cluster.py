"""A simulated cluster: the real management service, ingress and coordinators, models of the rest, and faults."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from client_models import ClientModel
from coordinator_models import Records, SimulatedCoordinator
from network import Channel, Network, Server
from node_models import MANAGEMENT, Fabric, NodeModel, registration_of
from values import NO_INPUT
from virtual_time import Process, World

from appliance.coordinator.processes import CoordinatorProcess, IngressProcess
from appliance.ingress.coordinators import Coordinators, report_orphaned_jobs
from appliance.management.service import ManagementService
from appliance.management.supervisor import ManagementSettings
from waferbox import roles
from waferbox.launch.spawn import SpawnError
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2, management_pb2_grpc, node_pb2

RECOVERY_SECONDS = "3"  # from one recovery point to the next; a setting of coordinators
FAULT_SECONDS = 40.0  # faults happen in this time
INGRESS = "ingress:9001"
NUM_HOSTS = 3  # of nodes
QUIET_SECONDS = 400.0  # after the last fault, in which every job must end


class SimulatedProcesses:
    """The control of the coordinators' processes, for one process of management or an ingress."""

    def __init__(self, cluster: "SimulatedCluster", owner: Process, ingress: str = "") -> None:
        """ingress: address of the owner, if it is an ingress, with which its coordinators end."""
        self._cluster = cluster
        self._owner = owner
        self._own_ingress = ingress

    async def start(self, request: ingress_pb2.RunCoordinatorRequest, ingress: str) -> CoordinatorProcess:
        if ingress:
            channel = Channel(self._cluster.network, self._owner, ingress)
            return IngressProcess(ingress, channel, request)  # type: ignore[arg-type]
        await asyncio.sleep(self._cluster.random.uniform(0.005, 0.5))
        if self._cluster.random.random() < self._cluster.spawn_failures:
            raise SpawnError("the fork server does not answer")
        coordinator = self._cluster.start_coordinator(request, self._own_ingress)
        if self._own_ingress:
            self._owner.on_end.append(coordinator.process.kill)
        return StartedProcess(coordinator, self._owner)

    def find(self, hello: management_pb2.CoordinatorHello) -> CoordinatorProcess | None:
        for coordinator in self._cluster.coordinators:
            process = coordinator.process
            if process.pid == hello.process_id and process.is_alive:
                return StartedProcess(coordinator, self._owner)
        return None

    async def forget(self, job: str) -> None:
        await asyncio.sleep(self._cluster.random.uniform(0.0, 0.05))
        records = self._cluster.records
        holder, hello = records.holders.get(job), records.hellos.get(job)
        is_here = hello is None or hello.ingress == self._own_ingress
        if is_here and (holder is None or not holder.is_alive):
            records.files.pop(job, None)


class StartedProcess:
    """A coordinator's process, as management has it."""

    cause = ""

    def __init__(self, coordinator: SimulatedCoordinator, owner: Process) -> None:
        self._coordinator = coordinator
        self._process = coordinator.process
        self._ended = asyncio.Event()
        ended = self._ended.set
        if self._process.is_alive:
            self._process.on_end.append(lambda: owner.loop.call_soon(ended))
        else:
            ended()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._process.status is not None
        return self._process.status

    def terminate(self) -> None:
        if self._process.is_alive:
            self._coordinator.terminate()

    def kill(self) -> None:
        # One that is stopped, or cut off, does not know yet that its stream has ended.
        if self._process.is_alive and self._process.stalled_until <= self._process.world.now:
            assert not self._coordinator.is_connected, "a coordinator is killed that has its stream"
        self._process.kill()

    async def close(self, seconds: float) -> None:
        self.terminate()
        try:
            async with asyncio.timeout(seconds):
                await self.wait()
        except TimeoutError:
            self.kill()


class OrphansOnDisk:
    """The jobs of an earlier management service whose coordinator may have ended."""

    def __init__(self, records: Records, ingress: str = "") -> None:
        self._records = records
        self._left = [job for job, hello in records.hellos.items() if not ingress or hello.ingress == ingress]

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, known: Collection[str]) -> Sequence[management_pb2.CoordinatorHello]:
        taken, hellos = [], self._records.hellos
        for job in list(self._left):
            if job in known or job not in hellos:
                self._left.remove(job)
            elif (holder := self._records.holders.get(job)) is None or not holder.is_alive:
                self._left.remove(job)
                taken.append(hellos[job])
        return taken


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a schedule.

    Attributes:
        at: when it happens, in seconds.
        kind: its name in FAULTS.
        seed: of what is drawn for it, such as the process that it is of.
    """

    at: float
    kind: str
    seed: int


def draw_schedule(seed: int, most: int, kinds: Sequence[str] = ()) -> list[Fault]:
    """The faults of a seed, at most so many, in the order of their times. kinds: by default all."""
    random = Random(f"faults of {seed}")
    faults = [
        Fault(random.uniform(0.0, FAULT_SECONDS), random.choice(kinds or list(FAULTS)), random.getrandbits(32))
        for _ in range(random.randint(0, most))
    ]
    return sorted(faults, key=lambda fault: fault.at)


class SimulatedCluster:
    """The cluster of one seed, and the faults of a schedule."""

    def __init__(self, seed: int, schedule: Sequence[Fault], cache_root: Path) -> None:
        self.schedule = schedule
        self.world = World(seed)
        self.random = self.world.random
        self.network = Network(self.world)
        self.records = Records()
        self.coordinators: list[SimulatedCoordinator] = []
        self.fabric = Fabric(self.network)
        self.nodes = self.fabric.nodes
        self.clients: list[ClientModel] = []
        self.spawn_failures = 0.0
        self._away_hosts: set[str] = set()
        self._is_over = False  # at the last event of management, of which there is always another
        self._numbers = itertools.count()
        self._cache_root = cache_root
        idle_seconds = self.random.choice([0.5, 3.0, 300.0])
        self._settings = ManagementSettings(cache_root=cache_root, idle_seconds=idle_seconds)
        self.management: ManagementService
        self.process: Process
        self.start_management()
        self.ingress: Process | None = None
        if self.random.random() < 0.5:
            self.start_ingress()
        wafers = self.random.randint(1, 4)
        spares = self.random.randint(0, 2)
        for role, count in (
            (node_pb2.ROLE_WAFER, wafers + spares),
            (node_pb2.ROLE_WORKER, wafers + spares),
            (node_pb2.ROLE_MEMORYX, self.random.randint(1, 3)),
            (node_pb2.ROLE_SWARMX, self.random.randint(1, 3)),
        ):
            for _ in range(count):
                self.add_node(role)
        for number in range(self.random.randint(1, 4)):
            num_csx = self.random.randint(1, wafers)
            request = management_pb2.CreateJobRequest(
                version=WIRE_VERSION,
                num_csx=num_csx,
                min_num_csx=self.random.choice([0, 1]),
                num_workers_per_csx=1,
                max_num_restarts=self.random.choice([0, 3, 20]),
                priority=self.random.randint(1, 3),
                run_ahead_steps=self.random.choice([1, 4, 100]),
            )
            self.clients.append(ClientModel(self.fabric, number, request, Random(self.random.random())))
        for fault in schedule:
            self.world.after(fault.at, self._happen, fault)

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_management(self) -> None:
        process = self.process = Process(self.world, "management", host="host-0")
        process.after_event = self._check
        # The names of jobs are those of no earlier service.
        random = Random(self.random.random())
        service = self.management = ManagementService(
            self._settings, lambda: None, lambda error: self.world.defects.append(repr(error)), process, random
        )
        server = Server(self.network, process, MANAGEMENT)
        management_pb2_grpc.add_ManagementServicer_to_server(service, server)  # type: ignore[arg-type]

        async def run() -> int:
            service.start(MANAGEMENT, SimulatedProcesses(self, process), OrphansOnDisk(self.records))
            await asyncio.get_running_loop().create_future()
            return 0

        process.start(run)

    def start_ingress(self) -> None:
        process = self.ingress = Process(self.world, "ingress", host="host-1")
        orphans = OrphansOnDisk(self.records, INGRESS)
        coordinators = Coordinators(SimulatedProcesses(self, process, INGRESS), lambda job: job in self.records.files)
        server = Server(self.network, process, INGRESS)
        ingress_pb2_grpc.add_IngressServicer_to_server(coordinators, server)  # type: ignore[arg-type]

        def hello() -> management_pb2.RegisterRequest:
            return management_pb2.RegisterRequest(
                role=node_pb2.ROLE_INGRESS, address=INGRESS, host=process.host, version=WIRE_VERSION
            )

        async def run() -> int:
            registration_of(self.network, process, hello).start()
            await report_orphaned_jobs(orphans, Channel(self.network, process, MANAGEMENT))  # type: ignore[arg-type]
            await asyncio.get_running_loop().create_future()
            return 0

        process.start(run)

    def add_node(self, role: "node_pb2.Role.ValueType", host: str = "") -> None:
        number = next(self._numbers)
        host = host or f"host-{number % NUM_HOSTS}"
        module = roles.role_of(role).module
        self.nodes.append(NodeModel(self.fabric, number, role, f"{module}-node-{number}:7000", host))

    def start_coordinator(self, request: ingress_pb2.RunCoordinatorRequest, ingress: str) -> SimulatedCoordinator:
        kept = ingress_pb2.RunCoordinatorRequest()
        kept.CopyFrom(request)
        self.coordinators.append(SimulatedCoordinator(self.fabric, kept, self.records, ingress, self._cache_root))
        return self.coordinators[-1]

    # --- faults -------------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        self.world.note(f"fault: {fault.kind}")
        FAULTS[fault.kind](self, Random(fault.seed))

    def _coordinator(self, random: Random) -> Process | None:
        alive = [each.process for each in self.coordinators if each.process.is_alive]
        return random.choice(alive) if alive else None

    def kill_coordinator(self, random: Random) -> None:
        if (process := self._coordinator(random)) is not None:
            process.kill()

    def stall_coordinator(self, random: Random) -> None:
        if (process := self._coordinator(random)) is not None:
            self._stall(process, random)

    def kill_node(self, random: Random) -> None:
        if not self.nodes:
            return
        node = random.choice(self.nodes)
        node.process.kill()
        self.nodes.remove(node)
        # A launcher starts another on the same host.
        self.world.after(random.uniform(0.5, 6.0), self.add_node, node.role, node.process.host)

    def lose_node(self, random: Random) -> None:
        """A node dies, and no launcher starts another."""
        if not self.nodes:
            return
        node = random.choice(self.nodes)
        if sum(other.role == node.role for other in self.nodes) > 1:
            node.process.kill()
            self.nodes.remove(node)

    def lose_host(self, random: Random) -> None:
        """A host vanishes with all its processes, as by a power cut, and comes back with its disk.

        It is back before a job gives up whose states may be there alone, and before a client, which may wait for the
        control processes.
        """
        host = f"host-{random.randrange(NUM_HOSTS)}"
        if host in self._away_hosts:
            return
        self._away_hosts.add(host)
        lost = [process for process in self.world.processes if process.host == host and process.is_alive]
        self.world.note(f"{host} vanishes")
        for client in self.clients:
            client.is_cancelled |= client.process in lost
        nodes = [node for node in self.nodes if node.process in lost]
        for process in lost:
            process.vanish()
        for node in nodes:
            self.nodes.remove(node)
        self.world.after(random.uniform(5.0, 45.0), self._return_host, host, lost, nodes)

    def _return_host(self, host: str, lost: Sequence[Process], nodes: Sequence[NodeModel]) -> None:
        self.world.note(f"{host} is back")
        self._away_hosts.discard(host)
        self.network.return_host(host)
        if self.process in lost:
            self.start_management()
        if self.ingress in lost:
            self.start_ingress()
        for node in nodes:
            self.add_node(node.role, host)

    def stall_node(self, random: Random) -> None:
        if self.nodes:
            self._stall(random.choice(self.nodes).process, random)

    def kill_management(self, random: Random) -> None:
        if self.process.is_alive:
            self.process.kill()
            self.world.after(random.uniform(0.1, 5.0), self.start_management)

    def stall_client(self, random: Random) -> None:
        alive = [client.process for client in self.clients if client.process.is_alive]
        if alive:
            self._stall(random.choice(alive), random)

    def kill_client(self, random: Random) -> None:
        alive = [client for client in self.clients if client.process.is_alive]
        if alive:
            client = random.choice(alive)
            client.is_cancelled = True
            client.process.kill()

    def fill_disk(self, random: Random) -> None:
        host = f"host-{random.randrange(NUM_HOSTS)}"
        self.fabric.full_hosts.add(host)
        self.world.after(random.uniform(0.5, 20.0), self.fabric.full_hosts.discard, host)

    def stall_management(self, random: Random) -> None:
        self._stall(self.process, random)

    def kill_ingress(self, random: Random) -> None:
        if self.ingress is not None and self.ingress.is_alive:
            self.ingress.kill()
            self.world.after(random.uniform(0.1, 10.0), self.start_ingress)

    def stall_ingress(self, random: Random) -> None:
        if self.ingress is not None:
            self._stall(self.ingress, random)

    def partition(self, random: Random) -> None:
        hosts = sorted({process.host for process in self.world.processes})
        one, other = random.sample(hosts, 2)
        self.network.partition(one, other, random.uniform(1.0, 20.0))

    def break_connection(self, random: Random) -> None:
        connections = list(self.network.connections)
        if connections:
            role = random.choice(sorted({connection.client.name.partition("-")[0] for connection in connections}))
            random.choice([each for each in connections if each.client.name.startswith(role)]).break_()

    def lose_frame(self, random: Random) -> None:
        """A frame between nodes is lost, so that all nodes of an epoch wait for each other."""
        running = [epoch for epoch in self.fabric.epochs.values() if epoch.is_running]
        if running:
            random.choice(running).lacks_frame = True

    def refuse_processes(self, random: Random) -> None:
        self.spawn_failures = 0.9
        self.world.after(random.uniform(0.5, 6.0), self._allow_processes)

    def _allow_processes(self) -> None:
        self.spawn_failures = 0.0

    def _stall(self, process: Process, random: Random) -> None:
        process.stall(random.choice([0.5, 6.0, 9.0, 20.0]))
        self.network.stalled(process)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """What must hold after every event of management."""
        service = self.management
        members = set()
        for node in service._registry._nodes.values():
            info = node.info
            if name := info.member:
                member = info.job, name
                assert member not in members, f"two nodes are one member: {member}"
                members.add(member)
        live = service._jobs.all_live()
        for job in live:
            assert job.name in service._supervisor._supervisions, f"{job.name} has no supervision"
        self._is_over = not live and not members and self._find_over()

    def _find_over(self) -> bool:
        """Whether all jobs have ended, and all nodes are free; without faults no recovery points are left."""
        service = self.management
        return (
            self.process.is_alive
            and all(not client.process.is_alive for client in self.clients)
            and not any(coordinator.process.is_alive for coordinator in self.coordinators)
            and not any(node.service.attached_job.job for node in self.nodes)
            and len(service._registry._nodes) == len(self.nodes) + (self.ingress is not None)
            and all(not node.info.job for node in service._registry._nodes.values())
            and (bool(self.schedule) or not self.fabric.disks)
        )

    def run(self) -> None:
        """Runs to the end of all jobs; later faults do not happen. Raises AssertionError if it does not come."""
        done = self.world.run(FAULT_SECONDS + QUIET_SECONDS, lambda: self._is_over)
        assert done, self._left_over()
        registry = self.management._registry
        assert not registry._waiters
        assert not registry._last_statuses
        assert not self.management._supervisor._supervisions
        self._check_ends()
        self._check_clients()

    def _check_clients(self) -> None:
        """Every job that may restart often enough has succeeded, unless a fault explains its end."""
        for client in self.clients:
            if client.is_cancelled or client.request.max_num_restarts < MOST_FAULTS:
                continue
            end = client.cause or client.refusal
            if NO_INPUT in end and client.may_pass_bad_step:
                continue
            explanations = [kinds for text, kinds in EXPLANATIONS.items() if text in end]
            if not any(each.had_hello for each in self.coordinators if each.job == client.job):
                # The job was being created: nothing is lost, and the script can be started again.
                explanations.append(CREATION_FAULTS)
            assert not end or any(kinds & self._kinds() for kinds in explanations), f"{client.job}: {end}"

    def _check_ends(self) -> None:
        """Every job that management knows has ended as it should, or with the cause that is true."""
        clients = {client.job: client for client in self.clients if client.job}
        for job in self.management._jobs.all():
            ran = [each for each in self.coordinators if each.job == job.name]
            finished = [each for each in ran if each.process.status == 0]
            phase, message = job.report.phase, job.report.message
            if any(each.end is not None and each.end.phase == phase for each in ran):
                continue
            if finished:
                end = finished[-1].end
                assert end is not None
                # Coordinator and management wait for each other for a while, to report the end, and then give up.
                both_stall = {"stall a coordinator", "stall the ingress"} <= self._kinds()
                is_late = message.startswith((NOT_CONNECTED, NOT_RUN)) and both_stall
                assert phase == end.phase or job.cancelled or self._was_away() or is_late, (job.report, end)
                continue
            assert phase == management_pb2.JOB_PHASE_FAILED or job.cancelled, job.report
            statuses = {f"its coordinator ended with status {each.process.status}" for each in ran}
            died = {NOT_CONNECTED, NOT_RUN, CUT_OFF, "the fork server does not answer", "cancelled"}
            assert any(message.startswith(cause) for cause in statuses | died) or "did not start" in message, message
            ends = [each.process.ended_at for each in ran]
            restarts = clients[job.name].request.max_num_restarts if job.name in clients else 0
            most = max(sum(end - 60.0 < other <= end for other in ends) for end in ends) if ends else 0
            may_continue = restarts >= most and ran and ran[-1].had_hello
            assert not may_continue or job.cancelled or "refuse processes" in self._kinds(), (message, restarts, ends)

    def _was_away(self) -> bool:
        """Whether management may have been out of reach for longer than a coordinator waits for it."""
        return not {"kill management", "partition"}.isdisjoint(self._kinds())

    def _kinds(self) -> set[str]:
        return {fault.kind for fault in self.schedule}

    def _left_over(self) -> str:
        service = self.management
        lines = [f"clients: {[client.process.name for client in self.clients if client.process.is_alive]}"]
        lines += [
            f"{job.name}: {service._supervisor._supervisions[job.name].state} {job.report}"
            for job in service._jobs.all_live()
        ]
        lines += [
            f"{each.process.name} {each.process.pid}: {each.service and each.service.job._driver.state}"
            for each in self.coordinators
            if each.process.is_alive
        ]
        lines += [f"{node.process.name} works for {node.work.job}" for node in self.nodes if node.work is not None]
        lines += [f"{node.info}" for node in service._registry._nodes.values() if node.info.job]
        lines.append(f"{len(service._registry._nodes)} registered of {len(self.nodes)}")
        return "\n".join(lines)


FAULTS: dict[str, Callable[[SimulatedCluster, Random], None]] = {
    "kill a coordinator": SimulatedCluster.kill_coordinator,
    "stall a coordinator": SimulatedCluster.stall_coordinator,
    "kill a node": SimulatedCluster.kill_node,
    "lose a node": SimulatedCluster.lose_node,
    "lose a host": SimulatedCluster.lose_host,
    "stall a node": SimulatedCluster.stall_node,
    "kill management": SimulatedCluster.kill_management,
    "stall management": SimulatedCluster.stall_management,
    "kill the ingress": SimulatedCluster.kill_ingress,
    "stall the ingress": SimulatedCluster.stall_ingress,
    "kill a client": SimulatedCluster.kill_client,
    "stall a client": SimulatedCluster.stall_client,
    "fill a disk": SimulatedCluster.fill_disk,
    "partition": SimulatedCluster.partition,
    "break a connection": SimulatedCluster.break_connection,
    "refuse processes": SimulatedCluster.refuse_processes,
    "lose a frame": SimulatedCluster.lose_frame,
}


# The faults by which no job may be created: a script waits for management for a few seconds.
CREATION_FAULTS = {
    "kill management",
    "stall management",
    "partition",
    "break a connection",
    "stall a client",
    "lose a host",
}
# The ends of jobs that a fault explains: a part of the message, and the faults.
NOT_CONNECTED = "its coordinator has not connected again"
NOT_RUN = f"the ingress at {INGRESS} does not run it"
CUT_OFF = "the connection to its script broke"
EXPLANATIONS: dict[str, set[str]] = {
    "no coordinator of job": {*CREATION_FAULTS, "stall a coordinator", "kill the ingress", "stall the ingress"},
    "did not start": {"refuse processes", "kill the ingress", "stall the ingress", "break a connection", "partition"},
    "failed to connect to management": {"kill management", "partition", "break a connection"},
    "the connection broke": {
        "kill management",
        "stall management",
        "kill the ingress",
        "partition",
        "break a connection",
    },
    # A script on another host that is stopped again, or cut off, before it has come back; or that gets the address of
    # the coordinator from a management service that is stopped meanwhile.
    "the client did not open a session within": {"stall a client", "stall management", "partition"},
    "the client did not come back within": {"stall a client", "stall management", "partition"},
    # The job has ended for want of its script, and management has been killed since.
    "started again after the end of the job": {"stall a client", "partition"},
    # The same while management is stopped, or cut off from the ingress.
    "the job was over": {"stall a client", "partition"},
    "no recovery point has the states": {"fill a disk"},
    # A job of the queue has got the nodes meanwhile.
    "there was no replacement": {"kill management", "stall management", "partition", "lose a node", "lose a host"},
    "and none is free": {
        "kill a node",
        "stall a node",
        "lose a host",
        "partition",
        "break a connection",
        "stall management",
    },
    # A node that is stopped, or whose host is away, for longer than a job waits is not in the cluster.
    "the job needs": {"lose a node", "stall a node", "lose a host"},
    # A node that was leased and cannot be reached.
    "did not answer within": {"partition", "stall a node", "lose a host"},
}


# --- Runs of seeds ----------------------------------------------------------------------------------------------------

MOST_FAULTS = 8


def failure_of(seed: int, schedule: Sequence[Fault], cache_root: Path) -> str:
    """Runs a schedule; returns what went wrong, and what happened; empty if all is well."""
    cluster = SimulatedCluster(seed, schedule, cache_root)
    try:
        cluster.run()
    except AssertionError as error:
        happened = "\n".join(f"{when:9.3f} s  {text}" for when, text in cluster.world.journal)
        return f"{error}\n{happened}"
    finally:
        cluster.world.close()
    return ""


def shortest_failure(seed: int, cache_root: Path) -> str:
    """Runs a seed; returns its failure, with as few of its faults as still fail; empty if all is well."""
    schedule = draw_schedule(seed, MOST_FAULTS)
    failure = failure_of(seed, schedule, cache_root)
    if not failure:
        return ""
    for fault in list(schedule):
        shorter = [other for other in schedule if other is not fault]
        if (shorter_failure := failure_of(seed, shorter, cache_root)) != "":
            schedule, failure = shorter, shorter_failure
    return f"seed {seed} fails with the schedule {schedule}:\n{failure}"

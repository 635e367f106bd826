"""Models of the processes around management: nodes, coordinators and clients. They speak as the real ones do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from random import Random
from typing import Any

import grpc
from network import Channel, Context, Network, Server
from tokens_shown import shown
from virtual_time import Process

from waferbox import __version__, deadlines, roles
from waferbox.security.guard import bearer, caller_of
from waferbox.security.tokens import Kind
from wsc.v1 import ingress_pb2, management_pb2, management_pb2_grpc, node_pb2, node_pb2_grpc

MANAGEMENT = "management:9000"
INGRESS = "ingress:9001"


async def keep_registered(
    network: Network, process: Process, hello: Callable[[bool], management_pb2.RegisterRequest]
) -> None:
    """Registers with management, and again whenever the stream ends.

    hello: returns the next message; called with whether it is the first of a registration.
    """

    async def heartbeats() -> AsyncIterator[management_pb2.RegisterRequest]:
        is_first = True
        while True:
            yield hello(is_first)
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


# --- Nodes ------------------------------------------------------------------------------------------------------------


class NodeModel(node_pb2_grpc.NodeServiceServicer):
    """A node: registers, renews its lease, and works for one job at a time."""

    def __init__(self, network: Network, number: int, role: "node_pb2.Role.ValueType", address: str) -> None:
        module = roles.role_of(role).module
        self.process = Process(network.world, f"{module}-node-{number}", host=f"host-{number % 3}")
        self.role = role
        self.address = address
        self.attached: node_pb2.AttachJob | None = None
        self.work: list[str] = []  # the jobs that it has worked for
        self._network = network
        self._lease = 0  # time of the last
        self._instance = ""
        self._instances = 0
        server = Server(network, self.process, address)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, server)  # type: ignore[arg-type]
        self._free = asyncio.Lock()
        self.process.start(self._run)

    async def _run(self) -> int:
        await keep_registered(self._network, self.process, self._hello)
        return 0

    def _hello(self, is_first: bool) -> management_pb2.RegisterRequest:
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
            async for request in request_iterator:
                if request.HasField("attach"):
                    assert request.attach.job == job
                    self.attached = request.attach
                    self.work.append(job)
                    yield node_pb2.AttachResponse(attached=node_pb2.Attached())
        finally:
            self.attached = None
            self._free.release()


# --- Coordinators -----------------------------------------------------------------------------------------------------


class Records:
    """The records of jobs on the disk, which outlive all processes."""

    def __init__(self) -> None:
        self.hellos: dict[str, management_pb2.CoordinatorHello] = {}
        self.holders: dict[str, Process] = {}


class CoordinatorModel:
    """A coordinator: gets nodes, attaches to them, replaces dead ones, works for a while, and reports."""

    def __init__(
        self,
        network: Network,
        request: ingress_pb2.RunCoordinatorRequest,
        records: Records,
        seconds: float,
        ingress: str,
    ) -> None:
        """seconds: the time that its job works with all its nodes. ingress: that runs it; empty: management does."""
        host = "host-1" if ingress else "host-0"
        self.process = Process(network.world, f"coordinator-{request.job}", host=host)
        self._ingress = ingress
        self._network = network
        self._request = request
        self._records = records
        self._left = seconds
        self.job = request.job
        self._job: management_pb2.CreateJobRequest | None = None
        self._nodes: dict[str, management_pb2.NodeInfo] = {}
        self._attached: dict[str, asyncio.Task[None]] = {}
        self._lost: dict[str, management_pb2.NodeInfo] = {}
        self._report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
        self._outbox: asyncio.Queue[management_pb2.CoordinateRequest | None] | None = None
        self._unanswered: list[management_pb2.CoordinateRequest] = []
        self._changed = asyncio.Event()
        self.end: management_pb2.JobReport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False  # the last report is sent
        self._is_answered = False  # on the present stream
        self.process.start(self._run)

    @property
    def had_hello(self) -> bool:
        """Whether management has answered it."""
        return self._job is not None

    @property
    def is_connected(self) -> bool:
        """Whether it has a stream on which management has answered."""
        return self._is_answered and self._outbox is not None

    def terminate(self) -> None:
        self._finish(management_pb2.JOB_PHASE_CANCELLED, "terminated")

    async def _run(self) -> int:
        job = self._request.job
        holder = self._records.holders.get(job)
        if holder is not None and holder.is_alive:
            return 75
        self._records.holders[job] = self.process
        known = self._records.hellos.get(job) if self._request.restarted else None
        if known is not None:
            self._nodes = {node.member: node for node in known.nodes}
        stream = asyncio.create_task(self._keep_stream())
        while self._job is None and not stream.done():
            await self._wait()
        if stream.done():
            return stream.result()
        request = self._job
        assert request is not None
        self._ask(
            acquire=management_pb2.Acquire(
                num_wafers=request.num_csx, num_workers_per_wafer=request.num_workers_per_csx
            )
        )
        self._say(management_pb2.JOB_PHASE_QUEUED)
        while self.end is None:
            if stream.done():
                return stream.result()
            if self._nodes and not self._unanswered:
                self._attach()
                lost = list(self._lost.values())
                if lost:
                    self._lost.clear()
                    self._ask(replace=management_pb2.Replace(nodes=lost))
                elif self._report.phase != management_pb2.JOB_PHASE_RUNNING:
                    self._say(management_pb2.JOB_PHASE_RUNNING)
            if self._is_working() and not self._tasks:
                self._begin(self._work())
            await self._wait()
        for task in self._attached.values():
            task.cancel()
        await asyncio.sleep(0.01)
        self._report = self.end
        self._put(management_pb2.CoordinateRequest(report=self.end))
        self._is_closing = True
        self._put(None)
        # Counted in steps, as by the real one: the time in which it is stalled is no time of management's.
        for _ in range(int(deadlines.END.report / 0.5)):
            if not stream.done():
                await asyncio.wait([stream], timeout=0.5)
        self._records.hellos.pop(job, None)
        return 0

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_working(self) -> bool:
        return bool(self._nodes) and not self._unanswered and not self._lost

    async def _work(self) -> None:
        while self.end is None and self._left > 0:
            await asyncio.sleep(0.25)
            if self._is_working():
                self._left -= 0.25
        self._finish(management_pb2.JOB_PHASE_SUCCEEDED, "")

    def _finish(self, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        if self.end is None:
            self.end = management_pb2.JobReport(phase=phase, message=message)
            self._changed.set()

    def _say(self, phase: "management_pb2.JobPhase.ValueType") -> None:
        self._report = management_pb2.JobReport(phase=phase)
        self._put(management_pb2.CoordinateRequest(report=self._report))

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for member, node in self._nodes.items():
            if member not in self._attached and member not in self._lost:
                task = asyncio.create_task(self._hold(node))
                self._attached[member] = task

    async def _hold(self, node: management_pb2.NodeInfo) -> None:
        channel = Channel(self._network, self.process, node.address, (bearer(node.lease),))
        stub = node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[arg-type]
        attach = node_pb2.AttachJob(job=self._request.job, node=node.member)

        async def requests() -> AsyncIterator[node_pb2.AttachRequest]:
            yield node_pb2.AttachRequest(attach=attach)
            await asyncio.get_running_loop().create_future()

        try:
            async for _ in stub.Attach(requests()):  # type: ignore[call-overload]
                pass
        except grpc.aio.AioRpcError:
            pass
        finally:
            await channel.close()
            if self._attached.get(node.member) is asyncio.current_task():
                del self._attached[node.member]
                self._lost[node.member] = node
                self._changed.set()

    # --- management ---------------------------------------------------------------------------------------------------

    def _ask(self, **kind: object) -> None:
        request = management_pb2.CoordinateRequest(**kind)  # type: ignore[arg-type]
        self._unanswered.append(request)
        self._put(request)

    def _put(self, request: management_pb2.CoordinateRequest | None) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(request)

    def _hello(self) -> management_pb2.CoordinatorHello:
        request = self._request
        hello = management_pb2.CoordinatorHello(
            job=request.job, address=f"{request.job}:{self.process.pid}", token=request.token, created=request.created
        )
        if self._job is not None:
            hello.request.CopyFrom(self._job)
            hello.report.CopyFrom(self._report)
            hello.nodes.extend(self._nodes.values())
            hello.process_id = self.process.pid
            hello.host, hello.ingress = self.process.host, self._ingress
        return hello

    async def _keep_stream(self) -> int:
        """Keeps a stream to management; returns the exit status if management refuses the job."""
        try:
            while True:
                outbox = self._outbox = asyncio.Queue()
                outbox.put_nowait(management_pb2.CoordinateRequest(hello=self._hello()))
                for request in self._unanswered:
                    outbox.put_nowait(request)
                if self._is_closing:
                    outbox.put_nowait(None)
                channel = Channel(self._network, self.process, MANAGEMENT, shown(Kind.COORDINATOR, self._request.job))
                stub = management_pb2_grpc.ManagementStub(channel)  # type: ignore[arg-type]

                async def requests(
                    outbox: "asyncio.Queue[management_pb2.CoordinateRequest | None]" = outbox,
                ) -> AsyncIterator[management_pb2.CoordinateRequest]:
                    while (request := await outbox.get()) is not None:
                        yield request

                try:
                    async for response in stub.Coordinate(requests()):  # type: ignore[call-overload]
                        self._take(response)
                    if self._is_closing:
                        return 0  # management has all reports
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        return 1
                    if error.code() is not grpc.StatusCode.UNAVAILABLE and "cancel" not in (error.details() or ""):
                        raise AssertionError(f"{error.code()}: {error.details()}") from error
                self._outbox, self._is_answered = None, False
                await channel.close()
                if self._job is None:
                    return 1  # management did not answer hello
                await asyncio.sleep(deadlines.COORDINATION.retry)
        finally:
            self._changed.set()

    def _take(self, response: management_pb2.CoordinateResponse) -> None:
        self._is_answered = True
        match response.WhichOneof("kind"):
            case "job":
                self._job = response.job
            case "acquired" if response.acquired.nodes:
                if self._unanswered:
                    self._unanswered.pop(0)
                self._take_nodes(response.acquired.nodes)
            case "acquired":
                self._finish(management_pb2.JOB_PHASE_FAILED, response.acquired.refusal)
            case "cancel":
                self._finish(management_pb2.JOB_PHASE_CANCELLED, "cancelled by a user")
            case "lost":
                member = response.lost.member
                if member in self._nodes and self._nodes[member].address == response.lost.address:
                    if (task := self._attached.pop(member, None)) is not None:
                        task.cancel()
                    self._lost[member] = self._nodes[member]
        if self._request.may_restart and self._job is not None:
            self._records.hellos[self._request.job] = self._hello()
        self._changed.set()

    def _take_nodes(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        before, self._nodes = self._nodes, {node.member: node for node in nodes}
        for member, node in self._nodes.items():
            if (member in before and before[member].instance != node.instance) or member in self._lost:
                self._lost.pop(member, None)
                if (task := self._attached.pop(member, None)) is not None:
                    task.cancel()


# --- Clients ----------------------------------------------------------------------------------------------------------


class ClientModel:
    """A client: creates a job, perhaps cancels it after a while, and waits for its end."""

    def __init__(self, network: Network, number: int, request: management_pb2.CreateJobRequest, random: Random) -> None:
        self.process = Process(network.world, f"client-{number}")
        self.request = request
        self.job = ""
        self.refusal = ""  # why no job was created
        self.is_cancelled = False
        self._network = network
        self._cancels_after = random.uniform(0.0, 20.0) if random.random() < 0.15 else None
        self._begins_after = random.uniform(0.0, 5.0)
        self.process.start(self._run)

    async def _run(self) -> int:
        await asyncio.sleep(self._begins_after)
        channel = Channel(self._network, self.process, MANAGEMENT, shown(Kind.USER, "ada"))
        stub = management_pb2_grpc.ManagementStub(channel)  # type: ignore[arg-type]
        create = self._network.world.random.choice([True, True, False])
        try:
            created = await stub.CreateJob(self.request, timeout=120.0, wait_for_ready=create)  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            self.refusal = f"{error.code().name}: {error.details()}"
            return 1
        self.job = created.job
        if self._cancels_after is not None:
            await asyncio.sleep(self._cancels_after)
            self.is_cancelled = True
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.CancelJob(  # type: ignore[misc]
                    management_pb2.CancelJobRequest(job=self.job), timeout=10.0, wait_for_ready=True
                )
        await channel.close()
        return 0

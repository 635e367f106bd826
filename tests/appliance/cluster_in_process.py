"""A cluster in this process: the real management service and coordinators, with nodes that run no kernels."""

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import grpc
from pretending_job import Behaviour, PretendingJob, plan_with_groups

from appliance.coordinator.compilation import CompileRefused
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.process_host import ProcessHost
from appliance.coordinator.processes import HostProcesses
from appliance.coordinator.record import JobRecord, OrphanedJobs, RecordFolder, record_folder
from appliance.coordinator.serving import CutOff, Event, serve_job
from appliance.coordinator.settings import CUT_OFF_STATUS, CoordinatorHome, CoordinatorSettings, read_settings
from appliance.finished_jobs import FinishedJobs
from appliance.management.service import ManagementService
from appliance.management.supervisor import ManagementSettings
from waferbox import roles
from waferbox.host.clock import SystemClock
from waferbox.rpc.address import bind
from waferbox.rpc.async_server import AsyncServer, make_async_channel
from waferbox.rpc.server import make_channel, through
from waferbox.runtime.node import Node, NodeSettings
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
    node_pb2,
    observation_pb2_grpc,
    plan_pb2,
)

LOSS, PARTS, STATE_OUT = 1, 2, 3  # groups; each has one value, with ten times the group's number
F32 = plan_pb2.ELEMENT_TYPE_FLOAT32
ROLES = {role.module: role for role in roles.LEASED}


def tensor_type(*shape: int) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=F32, shape=shape)


def make_plan(num_csx: int, num_shards: int, outputs: bool = True) -> plan_pb2.Plan:
    """A loss from SwarmX, a tensor gathered from the wafers, and a value from shard 0."""
    plan = plan_pb2.Plan(format=1, num_csx=num_csx, num_shards=num_shards, batch_rows=8 * num_csx)
    plan.wafer.micro_batches = plan.worker.micro_batches = 1
    for shard in range(num_shards):
        part = plan.memoryx.add(shard=shard)
        part.states.add(value=1, name=f"weight.{shard}", type=tensor_type(4))
        part.states.add(value=2, name="step", type=tensor_type(), replicated=True)
    if outputs:
        for group, kind, shape in (
            (LOSS, plan_pb2.GROUP_KIND_REDUCTION, ()),
            (PARTS, plan_pb2.GROUP_KIND_REDUCTION, (2, 3 * num_csx)),
            (STATE_OUT, plan_pb2.GROUP_KIND_OUTPUT, ()),
        ):
            nbytes = 4
            for size in shape:
                nbytes *= size
            one = plan.coordinator.groups.add(id=group, kind=kind, nbytes=nbytes)
            one.members.add(value=10 * group, type=tensor_type(*shape), offset=0)
            plan.coordinator.outputs.add(
                name=f"output_{group}", type=tensor_type(*shape), group=group, value=10 * group
            )
        plan.coordinator.outputs[1].gathered = True
        plan.coordinator.outputs[1].dim = 1
        plan.coordinator.outputs[1].outer = 1
    return plan


def fake_compile(
    cirh: str, num_csx: int, num_shards: int, placed: Mapping[str, int]
) -> tuple[str, plan_pb2.Plan, bool]:
    if cirh == "refuse":
        raise CompileRefused("no rule for aten.foo, train.py:3")
    if cirh == "defect":
        raise RuntimeError("a défaut")
    artifact = f"artifact-{cirh}{'-placed' if placed else ''}"
    return artifact, make_plan(num_csx, num_shards, outputs=cirh != "silent"), False


jobs_by_loop: dict[asyncio.AbstractEventLoop, CoordinatedJob] = {}  # of the coordinators that run


async def drop_dead(job: CoordinatedJob | None, host: ProcessHost, record: JobRecord) -> None:
    """Acts as the death of the coordinator's process: its sockets close, and it sends and writes nothing more."""
    record._is_kept = False
    record.close()
    if job is not None:
        management = job._management
        attachments = list(job._nodes._attachments.values())
        tasks = [*job._tasks, *(each._reading for each in attachments)]
        tasks += [] if management._keeping is None else [management._keeping]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for attachment in attachments:
            await attachment._channel.close(None)
        await management._channel.close(None)
    await host.stop(0)
    for execution in [] if job is None else job._executions.live():
        await execution.close()


class ThreadChild:
    """A coordinator in a thread instead of a process."""

    cause = ""

    def __init__(self, fd: int) -> None:
        self.pid = next(numbers)
        self.settings: CoordinatorSettings = read_settings(fd)
        children_by_job[self.settings.job] = self
        self._loop = asyncio.new_event_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._serving: asyncio.Task[int] | None = None
        self._status: int | None = None
        self._ended = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def compile_step(
            cirh: str, num_csx: int, num_shards: int, placed: Mapping[str, int], options: plan_pb2.CompileOptions
        ) -> tuple[str, plan_pb2.Plan, bool]:
            artifact, plan, cached = fake_compile(cirh, num_csx, num_shards, placed)
            return artifact, plan_with_groups(plan), cached

        async def serve() -> int:
            host = ProcessHost(self.settings, SystemClock())
            record = JobRecord(RecordFolder(record_folder(self.settings.cache_root, self.settings.job)))
            self._serving = asyncio.create_task(serve_job(self.settings, compile_step, self.events, host, record))
            try:
                return await self._serving
            except CutOff:
                await drop_dead(jobs_by_loop.get(self._loop), host, record)
                return CUT_OFF_STATUS
            except asyncio.CancelledError:  # killed
                await drop_dead(jobs_by_loop.get(self._loop), host, record)
                return -9
            finally:
                host.close()

        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._status = runner.run(serve())
        finally:
            jobs_by_loop.pop(self._loop, None)
            os.eventfd_write(self._ended, 1)

    def fileno(self) -> int:
        return self._ended

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout_seconds: float | None = None) -> int:
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError
        return self._status if self._status is not None else 1

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function in the event loop of the coordinator, if it runs."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def terminate(self) -> None:
        if self.settings.may_restart:
            self.kill()
        else:
            self.call(self.events.put_nowait, Event.TERMINATE)

    def kill(self) -> None:
        """Ends the coordinator, as kill -9 ends its process."""
        self.call(lambda: self._serving and self._serving.cancel())

    def close(self, deadline_seconds: float = 10.0) -> int:
        self.terminate()
        status = self.wait(deadline_seconds)
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1
        return status


numbers = itertools.count(1)
children_by_job: dict[str, ThreadChild] = {}  # the latest coordinator of each job


def coordinator_home(management: str, cache_root: Path) -> CoordinatorHome:
    return CoordinatorHome(
        management=management,
        host="127.0.0.1",
        cache_root=cache_root,
        compile_root=None,
        terminated="its cluster went down",
    )


class ClusterInProcess:
    """A management service, and the nodes that a test adds."""

    def __init__(self, cache_root: Path, lease_seconds: float) -> None:
        self.behaviour = Behaviour()
        self.nodes: list[tuple[str, Node]] = []
        self.shutdown = threading.Event()
        self.defects: list[Exception] = []
        self.settings = ManagementSettings(cache_root=cache_root, lease_seconds=lease_seconds)
        self.start_management("127.0.0.1:0")

    def start_management(self, address: str) -> None:
        self.service = ManagementService(
            self.settings,
            self.shutdown.set,
            self.defects.append,
            finished=FinishedJobs(self.settings.cache_root),
        )
        self.server = AsyncServer(on_defect=self.defects.append, owner_of=self.service.owner_of)
        self.address = bind(self.server.server, address)
        management_pb2_grpc.add_ManagementServicer_to_server(self.service, self.server.server)
        observation_pb2_grpc.add_ObservationServicer_to_server(self.service.observation, self.server.server)
        self.server.start()
        home = coordinator_home(self.address, self.settings.cache_root)
        self.processes = HostProcesses(home, make_async_channel)
        self.channel = make_channel(self.address)
        grpc.channel_ready_future(self.channel).result(10)  # what could not connect before may not try again at once
        orphans = OrphanedJobs(self.settings.cache_root, self.address)
        self.call(lambda: self.service.start(self.address, self.processes, orphans))
        self.stub = management_pb2_grpc.ManagementStub(self.channel)
        self.observation = observation_pb2_grpc.ObservationStub(self.channel)

    def stop_management(self) -> None:
        """Acts as the death of the management service: the coordinators and the nodes stay."""
        self.server.loop.run(self.service.close(end_jobs=False))
        self.channel.close()
        self.server.stop(0)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the event loop of management."""

        async def call() -> Any:
            return function()

        return self.server.loop.run(call())

    def coordinator(self, job: str) -> Any:
        """The process of a job's coordinator, as management has it."""
        return self.service._supervisor._supervisions[job]._process

    def add(self, **counts: int) -> None:
        """Adds a node of each role module; returns when all are registered."""
        for module, count in counts.items():
            for _ in range(count):
                node = Node(
                    ROLES[module],
                    NodeSettings(management=self.address),
                    lambda context: PretendingJob(context, self.behaviour),
                )
                node.start()
                self.nodes.append((module, node))
                self.wait_for_nodes(len(self.nodes))  # one by one: in this order they are wafer-0, wafer-1, ...

    def wait_for_nodes(self, count: int) -> list[management_pb2.NodeInfo]:
        request = management_pb2.ListNodesRequest(at_least=count, wait_seconds=10)
        nodes = list(self.stub.ListNodes(request).nodes)
        assert len(nodes) >= count
        return nodes

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            time.sleep(0.01)

    def jobs(self) -> list[management_pb2.JobInfo]:
        return list(self.stub.ListJobs(management_pb2.ListJobsRequest()).jobs)

    def free_nodes(self) -> int:
        return sum(not node.job for node in self.stub.ListNodes(management_pb2.ListNodesRequest()).nodes)

    def kill(self, index: int) -> None:
        """Acts as the death of a node: its server and its registration end at once."""
        _, node = self.nodes.pop(index)
        node._server.stop(0).wait()
        node.close()

    def close(self) -> None:
        self.server.loop.run(self.service.close(end_jobs=True))
        for _, node in self.nodes:
            node.close()
        self.channel.close()
        self.server.stop(0.5)
        assert not self.defects


class Execution(Protocol):
    """The call of an execution."""

    def __iter__(self) -> Iterator[coordinator_pb2.ExecuteResponse]: ...

    def __next__(self) -> coordinator_pb2.ExecuteResponse: ...

    def cancel(self) -> object: ...


class Client:
    """A client whose calls, which a script's session makes otherwise, are made by the test."""

    def __init__(self, cluster: ClusterInProcess, ingress: str = "", **settings: object) -> None:
        """ingress: the address through which the client reaches the cluster; empty: it reaches all of it."""
        wanted: dict[str, Any] = {"version": WIRE_VERSION, "num_csx": 1, "num_workers_per_csx": 1, **settings}
        request = management_pb2.CreateJobRequest(**wanted)
        self.cluster = cluster
        with make_channel(ingress or cluster.address) as channel:
            self.created = management_pb2_grpc.ManagementStub(channel).CreateJob(request, timeout=20)
        self.channel = make_channel(
            through(ingress if self.created.gateway else "", self.created.coordinator), self.created.token
        )
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self.session = self.stub.Session(coordinator_pb2.SessionRequest(token=self.created.token))
        assert next(iter(self.session)).HasField("opened")
        self.requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self.call: Execution
        self.outputs: deque[coordinator_pb2.StepOutputs] = deque()

    def compile(self, cirh: str = "good") -> coordinator_pb2.CompileResponse:
        return self.stub.Compile(coordinator_pb2.CompileRequest(token=self.created.token, cirh=cirh), timeout=20)

    def begin(
        self,
        num_steps: int,
        *,
        artifact: str = "artifact-good",
        activation_steps: int = 1,
        checkpoint_steps: tuple[int, ...] = (),
    ) -> None:
        self.requests = queue.SimpleQueue()
        self.outputs.clear()
        self.send(
            begin=coordinator_pb2.Begin(
                token=self.created.token,
                artifact=artifact,
                loader="train",
                num_steps=num_steps,
                activation_steps=activation_steps,
                checkpoint_steps=checkpoint_steps,
            )
        )
        self.call = self.stub.Execute(iter(self.requests.get, None))  # type: ignore[assignment]  # the stubs have no __next__

    def start(self) -> coordinator_pb2.StateWanted:
        """Sends the states, again if a node dies meanwhile; returns the request for them."""
        wanted = self.receive("state_wanted").state_wanted
        while True:
            self.send(state_sent=coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=True))
            response = next(self.call)
            if response.WhichOneof("kind") == "started":
                return wanted
            assert response.WhichOneof("kind") == "state_wanted", response
            wanted = response.state_wanted

    def send(self, **kind: object) -> None:
        self.requests.put(coordinator_pb2.ExecuteRequest(**kind))  # type: ignore[arg-type]

    def consumed(self, step: int) -> None:
        self.send(consumed=coordinator_pb2.Consumed(step=step))

    def receive(self, kind: str) -> coordinator_pb2.ExecuteResponse:
        response = next(self.call)
        assert response.WhichOneof("kind") == kind, response
        return response

    def receive_outputs(self) -> coordinator_pb2.StepOutputs:
        """Returns the outputs of the next step."""
        if not self.outputs:
            self.outputs.extend(self.receive("outputs").outputs.steps)
        return self.outputs.popleft()

    def consume(self, count: int) -> list[int]:
        """Receives the outputs of so many steps, and consumes each; returns the numbers of these steps."""
        steps = []
        for step in range(1, count + 1):
            steps.append(self.receive_outputs().step)
            self.consumed(step)
        return steps

    def failure(self) -> node_pb2.Failure:
        """Returns the failure that ends the session."""
        *_, last = self.session
        return last.failure

    def close(self, *, cancelled: bool = False, error: str = "") -> None:
        """Ends the session, as a script does at its end."""
        with contextlib.suppress(grpc.RpcError, ValueError):  # the latter: the test has closed the channel
            request = coordinator_pb2.FinishRequest(token=self.created.token, cancelled=cancelled, error=error)
            self.stub.Finish(request, timeout=1)
        self.requests.put(None)
        self.session.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
        self.channel.close()


def run(client: Client, num_steps: int, **settings: Any) -> list[coordinator_pb2.ExecuteResponse]:
    """A whole execution with a client that consumes at once."""
    client.begin(num_steps, **settings)
    client.start()
    responses = []
    for response in client.call:
        match response.WhichOneof("kind"):
            case "outputs":
                for outputs in response.outputs.steps:
                    batch = coordinator_pb2.OutputBatch(steps=[outputs])
                    responses.append(coordinator_pb2.ExecuteResponse(outputs=batch))
                    client.consumed(outputs.step)
                continue
            case "checkpoint":
                client.send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=response.checkpoint.step))
        responses.append(response)
    return responses


def kinds(responses: list[coordinator_pb2.ExecuteResponse]) -> list[str]:
    names = []
    for response in responses:
        kind = response.WhichOneof("kind")
        assert kind is not None
        step = response.outputs.steps[0].step if kind == "outputs" else getattr(getattr(response, kind), "step", "")
        names.append(f"{kind} {step}".strip())
    return names

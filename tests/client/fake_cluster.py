"""A management service, a coordinator and MemoryX in this process, for a session without a cluster.

The "module" that the client sends is a JSON list of names and types; what a step computes is a function of the test.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import torch

from cstorch._internal.session import cluster_state
from cstorch._internal.session.execution import cluster_execution, traced_step
from cstorch._internal.session.transfer import Outgoing
from cstorch._internal.tracing import Trace
from waferbox.cirh.execution import initialisation
from waferbox.links.elements import torch_dtype
from waferbox.rpc.server import INGRESS_KEY
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc, node_pb2, plan_pb2

ELEMENT_TYPES = {
    torch.float32: plan_pb2.ELEMENT_TYPE_FLOAT32,
    torch.int64: plan_pb2.ELEMENT_TYPE_INT64,
    torch.bool: plan_pb2.ELEMENT_TYPE_BOOL,
}
DTYPES = {str(dtype): dtype for dtype in ELEMENT_TYPES}

State = dict[str, torch.Tensor]
Step = Callable[[State, int], dict[str, torch.Tensor]]  # changes the state, returns the outputs by name


def describe(trace: Trace) -> str:
    """What takes the place of the CIRH text."""
    return json.dumps(
        {
            "states": [[info.name, list(info.cell.shape), str(info.cell.dtype)] for info in trace.states],
            "outputs": [[info.name, list(info.tensor.shape), str(info.tensor.dtype)] for info in trace.outputs],
            "graph": str(trace.graph),
        }
    )


def tensor_type(shape: list[int], dtype: str) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=ELEMENT_TYPES[DTYPES[dtype]], shape=shape)


@dataclass
class FakeCluster:
    """The cluster, and the requests that it has received."""

    step: Step = lambda state, step: {}
    live: State = field(default_factory=dict)
    snapshots: dict[int, State] = field(default_factory=dict)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    options: list[plan_pb2.CompileOptions] = field(default_factory=list)  # of what was compiled
    prepared: list[node_pb2.PrepareInput] = field(default_factory=list)
    begun: list[coordinator_pb2.Begin] = field(default_factory=list)
    written: list[list[str]] = field(default_factory=list)
    created: list[management_pb2.CreateJobRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    stopped_after: list[int] = field(default_factory=list)  # the steps after which the script left its loops
    finished: list[bool] = field(default_factory=list)  # whether the script cancelled the job
    sessions_ended: threading.Event = field(default_factory=threading.Event)
    sessions: "list[queue.SimpleQueue[node_pb2.Failure | None]]" = field(default_factory=list)  # what ends each
    steps_run: int = 0
    step_seconds: float = 0.01
    run_ahead_steps: int = 4
    fail_at: tuple[int, node_pb2.Failure] | None = None
    step_without_input: int = 0
    opens: bool = True  # whether it answers sessions
    refuse_job: tuple[grpc.StatusCode, str] | None = None
    refuse_compile: tuple[grpc.StatusCode, str] | None = None
    waits: list[management_pb2.QueueStatus] = field(default_factory=list)  # of a job, until it is its turn
    found: coordinator_pb2.CompileResponse | None = None  # what more a compile answers
    gateway: bool = False
    away: int = 0  # so many calls that ask for a job find an ingress, and no management service behind it
    address: str = ""

    def serve(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(16))
        management_pb2_grpc.add_ManagementServicer_to_server(Management(self), server)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Coordinator(self), server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        return server

    def connect_client(self, monkeypatch: Any) -> None:
        """Replaces the lowering, and the links to MemoryX, in the client; its jobs are this cluster's."""
        monkeypatch.setenv("WAFERBOX_MANAGEMENT", self.address)
        monkeypatch.setattr(traced_step, "lower", lambda trace: trace)
        monkeypatch.setattr(traced_step, "print_module", describe)
        monkeypatch.setattr(cluster_execution, "verify", lambda module: None)  # it is no module
        monkeypatch.setattr(cluster_state, "ShardConnection", lambda shard, lane, job, gateway: FakeShard(self))


class FakeShard:
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._writes = False

    def write(self, states: list[Outgoing]) -> None:
        self._writes = True
        for state in states:
            assert state.value().nbytes == state.nbytes
            self._cluster.live[state.name] = state.value().clone()
        self._writes = False
        self._cluster.written[-1].extend(state.name for state in states)

    def initialise(self, states: list[node_pb2.InitialState], unstaged: Callable[[], object]) -> None:
        for state in states:
            buffer = state.program.buffers[state.program.result]
            value = torch.empty(buffer.elements, dtype=torch_dtype(buffer.element_type))
            initialisation.run(state.program, value)
            self._cluster.live[state.name] = value
        self._cluster.written[-1].extend(state.name for state in states)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> Iterator[torch.Tensor]:
        assert not self._writes, "one transfer at a time"
        source = self._cluster.live if step == 0 else self._cluster.snapshots[step]
        assert source[name].dtype == dtype
        yield source[name].reshape(shape)

    def close(self) -> None:
        pass


class Management(management_pb2_grpc.ManagementServicer):
    # No client calls these, which the stubs call abstract.
    Register = management_pb2_grpc.ManagementServicer.Register
    Coordinate = management_pb2_grpc.ManagementServicer.Coordinate
    AdoptJob = management_pb2_grpc.ManagementServicer.AdoptJob
    ListNodes = management_pb2_grpc.ManagementServicer.ListNodes
    ListJobs = management_pb2_grpc.ManagementServicer.ListJobs
    GetJob = management_pb2_grpc.ManagementServicer.GetJob
    SetPriority = management_pb2_grpc.ManagementServicer.SetPriority
    LabelJob = management_pb2_grpc.ManagementServicer.LabelJob
    Shutdown = management_pb2_grpc.ManagementServicer.Shutdown

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def CreateJob(
        self, request: management_pb2.CreateJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CreateJobResponse:
        if self._cluster.away:
            self._cluster.away -= 1
            context.set_trailing_metadata(((INGRESS_KEY, ""),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no management service answers the ingress")
        if self._cluster.refuse_job is not None:
            context.abort(*self._cluster.refuse_job)
        assert request.version == WIRE_VERSION
        self._cluster.created.append(request)
        self._cluster.live.clear()  # of the job before; the end of its session may come later
        name = f"job-{len(self._cluster.created)}"
        address, gateway = self._cluster.address, self._cluster.gateway
        return management_pb2.CreateJobResponse(job=name, coordinator=address, token="secret", gateway=gateway)

    def CancelJob(
        self, request: management_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CancelJobResponse:
        self._cluster.cancelled.append(request.job)
        return management_pb2.CancelJobResponse()


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def Session(
        self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        assert request.token == "secret"
        end: queue.SimpleQueue[node_pb2.Failure | None] = queue.SimpleQueue()
        self._cluster.sessions.append(end)
        context.add_callback(lambda: end.put(None))
        job = len(self._cluster.created)
        if not self._cluster.opens:
            end.get(timeout=60)
            return
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        for status in self._cluster.waits:
            yield coordinator_pb2.SessionResponse(queue=status)
        yield coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady())
        failure = end.get(timeout=60)
        if failure is not None:
            yield coordinator_pb2.SessionResponse(failure=failure)
            return
        if job == len(self._cluster.created):
            self._cluster.live.clear()
        self._cluster.sessions_ended.set()

    def Shards(
        self, request: coordinator_pb2.ShardsRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.ShardsResponse:
        return coordinator_pb2.ShardsResponse()

    def Finish(
        self, request: coordinator_pb2.FinishRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.FinishResponse:
        self._cluster.finished.append(request.cancelled)
        return coordinator_pb2.FinishResponse()

    def Compile(
        self, request: coordinator_pb2.CompileRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.CompileResponse:
        if self._cluster.refuse_compile is not None:
            context.abort(*self._cluster.refuse_compile)
        module = json.loads(request.cirh)
        self._cluster.compiled.append(module)
        self._cluster.options.append(request.options)
        response = coordinator_pb2.CompileResponse(
            artifact=str(len(self._cluster.compiled) - 1),
            states=[
                coordinator_pb2.StatePlacement(name=name, type=tensor_type(shape, dtype))
                for name, shape, dtype in module["states"]
            ],
            outputs=[
                plan_pb2.Output(name=name, type=tensor_type(shape, dtype)) for name, shape, dtype in module["outputs"]
            ],
        )
        if self._cluster.found is not None:
            response.MergeFrom(self._cluster.found)
        return response

    def PrepareInput(
        self, request: coordinator_pb2.PrepareInputRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.PrepareInputResponse:
        self._cluster.prepared.append(request.input)
        return coordinator_pb2.PrepareInputResponse()

    def Execute(
        self, requests: Iterator[coordinator_pb2.ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.ExecuteResponse]:
        cluster = self._cluster
        begin = next(requests).begin
        cluster.begun.append(begin)
        cluster.written.append([])
        module = cluster.compiled[int(begin.artifact)]
        missing = [name for name, _, _ in module["states"] if name not in cluster.live]
        shard = coordinator_pb2.StateShard(shard=0, address="memoryx:1", job="job")
        yield response(state_wanted=coordinator_pb2.StateWanted(missing=missing, shards=[shard]))
        assert next(requests).WhichOneof("kind") == "state_sent"
        yield response(started=coordinator_pb2.Started())
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for request in requests:
                    inbox.put(request)
            inbox.put(None)  # the script has left

        threading.Thread(target=read, daemon=True).start()
        consumed = cluster.steps_run = 0
        sent: list[int] = []
        after = {0: {name: value.clone() for name, value in cluster.live.items()}}  # the states, by step

        def stopped_after(step: int) -> coordinator_pb2.ExecuteResponse:
            cluster.stopped_after.append(step)
            cluster.live.update(after[step])
            return response(finished=coordinator_pb2.ExecutionFinished())

        for step in range(1, begin.num_steps + 1):
            if cluster.fail_at is not None and cluster.fail_at[0] == step:
                yield response(failed=cluster.fail_at[1])
                return
            if step == cluster.step_without_input:
                failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_INPUT, message="no picture", step=step)
                yield response(input_failed=failure)
                while (request := inbox.get(timeout=30)).WhichOneof("kind") != "stop_after":
                    pass
                yield stopped_after(request.stop_after.step)
                return
            outputs = cluster.step(cluster.live, step)
            cluster.steps_run = step
            if step % begin.activation_steps == 0 or step == begin.num_steps:
                tensors = [outputs[name].numpy().tobytes() for name, _, _ in module["outputs"]]
                one = coordinator_pb2.StepOutputs(step=step, tensors=tensors, seconds=cluster.step_seconds * step)
                yield response(outputs=coordinator_pb2.OutputBatch(steps=[one]))
                sent.append(step)
            if step in begin.checkpoint_steps:
                cluster.snapshots[step] = {name: value.clone() for name, value in cluster.live.items()}
                yield response(checkpoint=coordinator_pb2.CheckpointReady(step=step))
            after[step] = {name: value.clone() for name, value in cluster.live.items()}
            while sum(each > consumed for each in sent) >= (1 if step == begin.num_steps else cluster.run_ahead_steps):
                request = inbox.get(timeout=30)
                if request is None:
                    return
                match request.WhichOneof("kind"):
                    case "consumed":
                        consumed = request.consumed.step
                    case "stop_after":
                        yield stopped_after(request.stop_after.step)
                        return
        yield response(finished=coordinator_pb2.ExecutionFinished(seconds={"wafer-0.compute": 1.0}))


StartCluster: TypeAlias = Callable[[Step], FakeCluster]  # see the fixture start_cluster


def response(**kind: Any) -> coordinator_pb2.ExecuteResponse:
    return coordinator_pb2.ExecuteResponse(**kind)


def until(is_so: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)

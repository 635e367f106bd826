"""Nodes that run a small plan, with a management service that only registers; the test is coordinator and workers."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import torch
from link_pairs import raise_defect
from small_plan import COUNT, GATHERED, LOSS, OUTER, ROWS

from waferbox.links.dialling import dial
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_channel, make_server
from waferbox.runtime.schedule import StepSchedule, worker_of_step
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2, node_pb2_grpc, observation_pb2, plan_pb2

DEADLINE = 30.0

_instances: dict[str, str] = {}  # of nodes that registered, by address
_registered = threading.Condition()


def lease_of(address: str) -> str:
    """Waits until the node at an address has registered; returns the coordinator's lease of it."""
    with _registered:
        assert _registered.wait_for(lambda: address in _instances, DEADLINE)
        return cluster_secret().token(Kind.LEASE, "job-1", _instances[address], str(time.time_ns()))


class FakeManagement(management_pb2_grpc.ManagementServicer):
    """A management service that accepts registrations, and does nothing else."""

    # Nodes call none of these, which the stubs call abstract.
    CreateJob = management_pb2_grpc.ManagementServicer.CreateJob
    Coordinate = management_pb2_grpc.ManagementServicer.Coordinate
    AdoptJob = management_pb2_grpc.ManagementServicer.AdoptJob
    ListNodes = management_pb2_grpc.ManagementServicer.ListNodes
    ListJobs = management_pb2_grpc.ManagementServicer.ListJobs
    GetJob = management_pb2_grpc.ManagementServicer.GetJob
    CancelJob = management_pb2_grpc.ManagementServicer.CancelJob
    SetPriority = management_pb2_grpc.ManagementServicer.SetPriority
    LabelJob = management_pb2_grpc.ManagementServicer.LabelJob
    Shutdown = management_pb2_grpc.ManagementServicer.Shutdown

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.registered: queue.Queue[management_pb2.RegisterRequest] = queue.Queue()
        _instances.clear()
        self.heartbeats = 0
        self.left = 0
        self.refusal = ""
        self._server = make_server()
        management_pb2_grpc.add_ManagementServicer_to_server(self, self._server)
        self.address = bind(self._server, listen)
        self._server.start()

    def Register(
        self, request_iterator: Iterator[management_pb2.RegisterRequest], context: grpc.ServicerContext
    ) -> Iterator[management_pb2.RegisterResponse]:
        hello = next(request_iterator)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        with _registered:
            _instances[hello.address] = hello.instance
            _registered.notify_all()
        self.registered.put(hello)
        yield management_pb2.RegisterResponse(node_id="node", lease_seconds=0.4)
        try:
            for _ in request_iterator:
                self.heartbeats += 1
        except grpc.RpcError:
            pass
        self.left += 1

    def wait_for(self, role: int) -> management_pb2.RegisterRequest:
        """Waits for the next registration, which must be of this role, and returns it."""
        request = self.registered.get(timeout=DEADLINE)
        assert request.role == role
        return request

    def close(self) -> None:
        self._server.stop(0).wait()


class AttachedNode:
    """The coordinator's side of one Attach stream."""

    def __init__(self, address: str, name: str, index: int, lane: "node_pb2.Lane.ValueType") -> None:
        self.name = name
        self.address = address
        self._channel = make_channel(address, lease_of(address))
        self._requests: queue.SimpleQueue[node_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._events: queue.Queue[node_pb2.AttachResponse | None] = queue.Queue()
        self.seen: list[observation_pb2.JobEvent] = []
        self.send(attach=node_pb2.AttachJob(job="job-1", node=name, index=index, lane=lane))
        self._call = node_pb2_grpc.NodeServiceStub(self._channel).Attach(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.endpoint = self.expect("attached").attached.endpoint

    def send(self, **kind: Any) -> None:
        self._requests.put(node_pb2.AttachRequest(**kind))

    def expect(self, kind: str) -> node_pb2.AttachResponse:
        """Returns the next event, which must be of this kind."""
        return self.expect_any(kind)

    def expect_any(self, *kinds: str) -> node_pb2.AttachResponse:
        """Returns the next event, which must be of one of these kinds."""
        event = self._events.get(timeout=DEADLINE)
        assert event is not None, f"{self.name} ended the stream"
        assert event.WhichOneof("kind") in kinds, f"{self.name}: {event}"
        return event

    def says_nothing(self, seconds: float) -> bool:
        """Fails if an event arrives within so many seconds."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return True
        raise AssertionError(f"{self.name}: {event}")

    def end(self) -> None:
        """Ends the stream, as a coordinator does at the end of its job."""
        self._requests.put(None)

    def says_no_more(self) -> bool:
        """Whether the node ends the stream without another event."""
        return self._events.get(timeout=DEADLINE) is None

    def close(self) -> None:
        self.end()
        self._call.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
        self._thread.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for event in self._call:
                if event.WhichOneof("kind") == "events":
                    self.seen.extend(event.events.events)
                else:
                    self._events.put(event)
        except grpc.RpcError:
            pass
        self._events.put(None)


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a job.

    The first SwarmX node is the root; without others, the wafers are its children. With `has_trees` each SwarmX node
    is the root of a tree over all wafers, and the shards are divided among them. A single wafer needs no SwarmX node.
    """

    memoryx: list[AttachedNode]
    swarmx: list[AttachedNode]
    wafers: list[AttachedNode]
    has_trees: bool = False

    @property
    def trees(self) -> list[int]:
        """The number of each shard's tree."""
        return [shard % len(self.swarmx) for shard in range(len(self.memoryx))] if self.has_trees else []

    @property
    def all(self) -> list[AttachedNode]:
        return [*self.memoryx, *self.swarmx, *self.wafers]


class JobPlan(Protocol):
    """What a job needs of a plan."""

    @property
    def num_wafers(self) -> int: ...
    @property
    def groups(self) -> Sequence[plan_pb2.Group]: ...
    def memoryx(self, shard: int) -> plan_pb2.MemoryXPlan: ...
    def swarmx(self) -> plan_pb2.SwarmXPlan: ...
    def wafer(self) -> plan_pb2.WaferPlan: ...
    def batch(self, wafer: int, step: int) -> Sequence[torch.Tensor]: ...


P = TypeVar("P", bound=JobPlan)


class SmallJob(Generic[P]):
    """A job with a small plan. It acts as the coordinator and the workers of its nodes."""

    def __init__(self, plan: P, nodes: Topology, lane: "node_pb2.Lane.ValueType", *, num_workers: int = 1) -> None:
        self.plan = plan
        self.nodes = nodes
        self.lane = lane
        self.num_workers = num_workers
        self.recovery_point = 0  # the point that is restored when a plan is loaded
        self.hub = Hub()
        self._stack = ExitStack()
        server = make_server()
        address = bind(server, "127.0.0.1:0")
        self.listener = LinkListener(address, raise_defect)
        self.listener.add_to_server(server)
        server.start()
        self._stack.callback(lambda: server.stop(0).wait())
        self._stack.callback(self.listener.close)
        self._specs: dict[str, list[node_pb2.LinkSpec]] = {node.name: [] for node in nodes.all}
        self._pending: dict[tuple[str, int], Any] = {}
        self.worker_threads: list[threading.Thread] = []
        self.worker_hubs: list[Hub] = []
        self.links: dict[tuple[str, int], Link] = {}

    def load(self, epoch: int, *, brings_plan: bool = True) -> dict[str, list[str]]:
        """Loads the plan, or that of the epoch before again; returns the missing states by node."""
        self._connect()
        same: dict[str, Any] = {"same_plan": True}
        for shard, node in enumerate(self.nodes.memoryx):
            self._load(node, epoch, **({"memoryx": self.plan.memoryx(shard)} if brings_plan else same))
        for node in self.nodes.swarmx:
            self._load(node, epoch, **({"swarmx": self.plan.swarmx()} if brings_plan else same))
        for number, node in enumerate(self.nodes.wafers):
            plan = {"wafer": self.plan.wafer()} if brings_plan else same
            self._load(node, epoch, wafer_number=number, **plan)
        for key, pending in self._pending.items():
            self.links[key] = pending.wait(DEADLINE)
        self.hub.add(self.links["outputs", 0])
        self.hub.add(self.links["memoryx", 0])
        for node in self.nodes.memoryx if self.recovery_point else ():
            kept = node.expect("recovery_point_kept").recovery_point_kept
            assert (kept.recovery_point, bool(kept.folder)) == (self.recovery_point, True)
        return {node.name: list(node.expect("loaded").loaded.missing_states) for node in self.nodes.all}

    def start(self, epoch: int, num_steps: int, *, feed: bool = True, **fields: Any) -> StepSchedule:
        start = node_pb2.Start(epoch=epoch, num_steps=num_steps, **fields)
        for node in self.nodes.all:
            node.send(start=start)
        if feed:
            for wafer in range(self.plan.num_wafers):
                for worker in range(self.num_workers):
                    self._feed(wafer, worker, num_steps, start.done_steps)
        return StepSchedule.from_start(start)

    def outputs(self, step: int, *, ack: bool = True) -> tuple[float, float, torch.Tensor]:
        """Returns the loss, the count and the gathered y of a step of the epoch."""
        wafers, memoryx = self.links["outputs", 0], self.links["memoryx", 0]
        loss = self.hub.receive(wafers, LOSS, step).tensor(torch.float32, (), 0).item()
        rows = self.plan.num_wafers * ROWS
        gathered = self.hub.receive(wafers, GATHERED, step).tensor(torch.float32, (rows, OUTER), 0).clone()
        count = self.hub.receive(memoryx, COUNT, step).tensor(torch.float32, (), 0).item()
        if ack:
            wafers.ack(step)
            memoryx.ack(step)
        return loss, count, gathered

    def stop(self, epoch: int) -> None:
        for hub in self.worker_hubs:
            hub.stop()
        for thread in self.worker_threads:
            thread.join(DEADLINE)
        for node in self.nodes.all:
            node.send(stop=node_pb2.Stop(epoch=epoch))
        for node in self.nodes.all:
            node.expect("stopped")
        self.close_links()

    def close_links(self) -> None:
        for hub in self.worker_hubs:
            hub.stop()
        for thread in self.worker_threads:
            thread.join(DEADLINE)
        for hub in self.worker_hubs:
            hub.close()
        for link in self.links.values():
            link.close()
        self.hub.close()
        self.hub = Hub()
        self.links.clear()
        self.worker_threads.clear()
        self.worker_hubs.clear()

    def close(self) -> None:
        self.close_links()
        self.hub.close()
        self._stack.close()

    def _load(self, node: AttachedNode, epoch: int, **plan: Any) -> None:
        load = node_pb2.Load(
            epoch=epoch,
            links=self._specs[node.name],
            recovery_point=self.recovery_point,
            trees=self.nodes.trees,
            **plan,
        )
        node.send(load=load)

    def _connect(self) -> None:
        for specs in self._specs.values():
            specs.clear()
        self._pending.clear()
        if not self.nodes.swarmx:
            self._connect_wafer()
        elif self.nodes.has_trees:
            self._connect_trees()
        else:
            self._connect_tree()
        for index, wafer in enumerate(self.nodes.wafers):
            for worker in range(self.num_workers):
                self._own_link(
                    wafer, node_pb2.LINK_PURPOSE_WORKER, worker, ("worker", index * self.num_workers + worker)
                )
        sender = self.nodes.swarmx[0] if self.nodes.swarmx else self.nodes.wafers[0]
        self._own_link(sender, node_pb2.LINK_PURPOSE_COORDINATOR, 0, ("outputs", 0))
        self._own_link(self.nodes.memoryx[0], node_pb2.LINK_PURPOSE_COORDINATOR, 0, ("memoryx", 0))

    def _connect_wafer(self) -> None:
        (wafer,) = self.nodes.wafers
        for index, shard in enumerate(self.nodes.memoryx):
            self._link(wafer, node_pb2.LINK_PURPOSE_SHARD, index, shard, node_pb2.LINK_PURPOSE_WAFER, 0)

    def _connect_tree(self) -> None:
        root, *leaves = self.nodes.swarmx
        parents = [
            leaves[w * len(leaves) // self.plan.num_wafers] if leaves else root for w in range(self.plan.num_wafers)
        ]
        below = {leaf.name: sum(parent is leaf for parent in parents) for leaf in leaves}
        for index, leaf in enumerate(leaves):
            self._link(
                leaf, node_pb2.LINK_PURPOSE_PARENT, 0, root, node_pb2.LINK_PURPOSE_CHILD, index, below[leaf.name]
            )
        position: dict[str, int] = {}
        for index, wafer in enumerate(self.nodes.wafers):
            parent = parents[index]
            number = position.setdefault(parent.name, 0)
            position[parent.name] += 1
            self._link(wafer, node_pb2.LINK_PURPOSE_PARENT, 0, parent, node_pb2.LINK_PURPOSE_CHILD, number)
        for index, shard in enumerate(self.nodes.memoryx):
            self._link(root, node_pb2.LINK_PURPOSE_SHARD, index, shard, node_pb2.LINK_PURPOSE_SWARMX, 0)

    def _connect_trees(self) -> None:
        for tree, root in enumerate(self.nodes.swarmx):
            for index, wafer in enumerate(self.nodes.wafers):
                self._link(
                    wafer, node_pb2.LINK_PURPOSE_PARENT, tree, root, node_pb2.LINK_PURPOSE_CHILD, index, tree=tree
                )
            for shard, its_tree in enumerate(self.nodes.trees):
                if tree in (0, its_tree):
                    memoryx = self.nodes.memoryx[shard]
                    self._link(root, node_pb2.LINK_PURPOSE_SHARD, shard, memoryx, node_pb2.LINK_PURPOSE_SWARMX, tree)

    def _link(
        self,
        dialer: AttachedNode,
        purpose: "node_pb2.LinkPurpose.ValueType",
        index: int,
        waiter: AttachedNode,
        its: "node_pb2.LinkPurpose.ValueType",
        its_index: int,
        wafers: int = 0,
        tree: int = 0,
    ) -> None:
        token = secrets.token_hex(16)
        self._specs[dialer.name].append(
            node_pb2.LinkSpec(
                token=token, peer=waiter.name, endpoint=waiter.endpoint, dial=True, purpose=purpose, index=index
            )
        )
        self._specs[waiter.name].append(
            node_pb2.LinkSpec(token=token, peer=dialer.name, purpose=its, index=its_index, num_wafers=wafers, tree=tree)
        )

    def _own_link(
        self, dialer: AttachedNode, purpose: "node_pb2.LinkPurpose.ValueType", index: int, key: tuple[str, int]
    ) -> None:
        token = secrets.token_hex(16)
        self._pending[key] = self.listener.expect(token, dialer.name)
        self._specs[dialer.name].append(
            node_pb2.LinkSpec(
                token=token,
                peer=f"{key[0]}-{key[1]}",
                endpoint=self.listener.endpoint(),
                dial=True,
                purpose=purpose,
                index=index,
            )
        )

    def _feed(self, wafer: int, worker: int, num_steps: int, done_steps: int) -> None:
        link = self.links["worker", wafer * self.num_workers + worker]
        hub = Hub()
        hub.add(link)
        slots = 3
        group = next(g for g in self.plan.groups if g.kind == plan_pb2.GROUP_KIND_BATCH)

        def feed() -> None:
            from waferbox.links.hub import Stopped

            ring = SharedMemory.create(slots * group.nbytes)
            link.limit_ahead(slots)
            try:
                steps = range(1, num_steps - done_steps + 1)
                for number, step in enumerate(s for s in steps if worker_of_step(s, self.num_workers) == worker):
                    while not link.may_send(step, "ack"):
                        hub.wait_acked(link, link.acked_step + 1)
                    offset = number % slots * group.nbytes
                    for member, tensor in zip(group.members, self.plan.batch(wafer, done_steps + step), strict=True):
                        ring.tensor(tensor.dtype, tuple(tensor.shape), offset + member.offset).copy_(tensor)
                    hub.send(link, group.id, step, Slice(ring, offset, group.nbytes), window="ack")
            except (Stopped, ConnectionError):
                pass
            finally:
                ring.close()

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        self.worker_threads.append(thread)
        self.worker_hubs.append(hub)


class StateClient:
    """A client of the StateService of one shard."""

    def __init__(self, node: AttachedNode, lane: "node_pb2.Lane.ValueType") -> None:
        self._channel = make_channel(node.address, cluster_secret().token(Kind.JOB, "job-1"))
        self._stub = node_pb2_grpc.StateServiceStub(self._channel)
        opened = self._stub.OpenState(node_pb2.OpenStateRequest(job="job-1"), timeout=DEADLINE)
        self._token = opened.token
        self._link = dial(
            opened.endpoint,
            opened.token,
            name=node.name,
            own_name="client",
            lane=lane,
            deadline_seconds=DEADLINE,
        )
        self._hub = Hub()
        self._hub.add(self._link)

    def write(self, tensors: dict[str, torch.Tensor]) -> int:
        call = self._stub.WriteState.future(self._request(list(tensors), 0), timeout=DEADLINE)
        for group, tensor in enumerate(tensors.values()):
            memory = SharedMemory.create(max(1, tensor.nbytes))
            memory.tensor(tensor.dtype, tuple(tensor.shape), 0).copy_(tensor)
            self._hub.send(self._link, group, 0, Slice(memory, 0, tensor.nbytes), as_bytes=True)
            memory.close()
        return call.result().nbytes

    def read(
        self, shapes: dict[str, tuple[int, ...]], step: int = 0, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        call = self._stub.ReadState.future(self._request(list(shapes), step), timeout=DEADLINE)
        found = {}
        for group, (name, shape) in enumerate(shapes.items()):
            message = self._hub.receive(self._link, group, step)
            found[name] = message.tensor(dtype, shape, 0).clone()
        call.result()
        return found

    def refused(self, method: str, names: Sequence[str], step: int = 0) -> grpc.RpcError:
        """Returns the error of a call that must fail."""
        try:
            getattr(self._stub, method)(self._request(names, step), timeout=DEADLINE)
        except grpc.RpcError as error:
            return error
        raise AssertionError("it was not refused")

    def _request(self, names: Sequence[str], step: int) -> node_pb2.TransferStateRequest:
        return node_pb2.TransferStateRequest(job="job-1", token=self._token, names=names, step=step)

    def close(self) -> None:
        self._hub.close()
        self._link.close()
        self._channel.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits until another thread makes a condition true."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)

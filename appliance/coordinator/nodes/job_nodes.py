"""The nodes that work for the job: leases from management, a stream to each node, commands, release."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import grpc

from appliance.coordinator.nodes.topology import COORDINATOR, Member, Topology
from waferbox import deadlines, roles
from waferbox.host.threads import GuardedThread
from waferbox.links.listener import LinkListener
from waferbox.rpc.server import make_channel
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, node_pb2_grpc, plan_pb2

# --- The stream to one node -----------------------------------------------------------------------------------------


class Attachment:
    """The coordinator's stream to one node, with the thread that reads it: commands out, responses in.

    The end of the stream is the node's end, as far as the job is concerned.
    """

    def __init__(
        self,
        member: Member,
        attach: node_pb2.AttachJob,
        on_response: Callable[[Member, node_pb2.AttachResponse], None],
        on_lost: Callable[[Member, str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """Opens the stream. The callbacks are called from its thread.

        Args:
            member: the node.
            attach: the first message.
            on_response: called with each response.
            on_lost: called with a reason when the stream ends without a call of end.
            on_defect: called with an unexpected exception that ended the thread.
        """
        self.member = member
        self.is_given_up = False  # dead, or considered dead
        self._plan: plan_pb2.Plan | None = None  # the plan whose part the node has
        self._on_response = on_response
        self._on_lost = on_lost
        self._ending = False
        self._commands: queue.SimpleQueue[node_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._commands.put(node_pb2.AttachRequest(attach=attach))
        self._channel = make_channel(member.node.address, member.node.lease)
        self._call = node_pb2_grpc.NodeServiceStub(self._channel).Attach(iter(self._commands.get, None))
        self._thread = GuardedThread(self._read, name=f"attachment-{member.name}", on_defect=on_defect)
        self._thread.start()

    def send(self, command: node_pb2.AttachRequest) -> None:
        """Queues a command. Never blocks."""
        self._commands.put(command)

    def load(self, load: node_pb2.Load, plan: plan_pb2.Plan) -> None:
        """Queues a Load with the node's part of a plan; without the part if the previous Load had the same."""
        load.same_plan = plan is self._plan
        if not load.same_plan:
            self._plan = plan
            _add_part(load, plan, self.member)
        self.send(node_pb2.AttachRequest(load=load))

    def end(self) -> None:
        """Closes this side of the stream: the node releases the job, and then closes its side."""
        self._ending = True
        self._commands.put(None)

    def close(self, seconds: float) -> bool:
        """Waits until the node has released the job; False if it has not after this many seconds."""
        self.end()
        self._thread.join(seconds)
        in_time = not self._thread.is_alive()
        self._channel.close()  # ends the stream if it is still open
        self._thread.join()
        return in_time

    def _read(self) -> None:
        reason = "it ended the connection"
        try:
            for response in self._call:
                self._on_response(self.member, response)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            # gRPC's own message about a broken connection is of no use to a user.
            lost = error.code() == grpc.StatusCode.UNAVAILABLE
            reason = "the connection to it broke" if lost else error.details() or error.code().name
        finally:
            self._commands.put(None)  # ends gRPC's thread that waits for commands
        if not self._ending:
            self._on_lost(self.member, reason)


def _add_part(load: node_pb2.Load, plan: plan_pb2.Plan, member: Member) -> None:
    match member.role:
        case node_pb2.ROLE_WAFER if plan.HasField("pipeline"):
            load.pipeline.CopyFrom(plan.pipeline)
        case node_pb2.ROLE_WAFER:
            load.wafer.CopyFrom(plan.wafer)
        case node_pb2.ROLE_MEMORYX:
            load.memoryx.CopyFrom(plan.memoryx[member.index])
        case node_pb2.ROLE_SWARMX:
            load.swarmx.CopyFrom(plan.swarmx)
        case node_pb2.ROLE_WORKER:
            load.worker.CopyFrom(plan.worker)


# --- All nodes of a job -----------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class NodesRefused(RuntimeError):
    """Raised when management has no nodes for the job; the message says which are missing, and how to add them."""


class NodesDied(RuntimeError):
    """Raised when a node has died during attachment to others."""


class JobMembers:
    """All members of a job and the streams to them.

    acquire is called once, then replace and reduce, in any thread; commands can be sent from any thread.
    """

    def __init__(
        self,
        job: str,
        request: management_pb2.CreateJobRequest,
        incarnation: int,
        acquire: Callable[[management_pb2.Acquire], management_pb2.Acquired],
        listener: LinkListener,
        on_response: Callable[[Member, node_pb2.AttachResponse], None],
        on_lost: Callable[[Member, str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """Makes the members without nodes; acquire gets these. The callbacks are called from threads of the streams.

        Args:
            job: its name.
            request: of the client.
            incarnation: of the job's coordinator.
            acquire: requests nodes of management.
            listener: accepts the coordinator's links.
            on_response: called with each response.
            on_lost: called with a member and a reason when its stream ended by itself.
            on_defect: called with an unexpected exception that ended a stream's thread.
        """
        self._job = job
        self._request = request
        self._incarnation = incarnation
        self._acquire = acquire
        self._listener = listener
        self._on_response = on_response
        self._on_lost = on_lost
        self._on_defect = on_defect
        self._changed = threading.Condition()
        self._topology: Topology | None = None
        self._endpoints: dict[str, node_pb2.LinkEndpoint] = {}
        self._attachments: dict[str, Attachment] = {}
        self._closing = False
        self._interrupted = False

    @property
    def is_leased(self) -> bool:
        """Whether the job has nodes, so that dead ones can be replaced."""
        return self._topology is not None

    @property
    def topology(self) -> Topology:
        """The present members; requires leased nodes."""
        assert self._topology is not None
        return self._topology

    def acquire(self, *, attaches: bool = True) -> None:
        """Leases the nodes and attaches to all; blocks, at most until close is called.

        Args:
            attaches: False leaves the attachment to replace: after a take-over some nodes may have died.

        Raises:
            NodesRefused: management has no nodes; also as the callback acquire.
            TimeoutError: some nodes do not answer; the message names them.
            NodesDied: a node has died; replace must attach to the rest.
        """
        request = self._request
        wanted = management_pb2.Acquire(
            num_wafers=request.num_csx,
            num_workers_per_wafer=request.num_workers_per_csx,
            max_shards=request.max_wgt_servers,
            execution_strategy=request.execution_strategy,
        )
        acquired = self._acquire(wanted)
        if not acquired.nodes:
            raise NodesRefused(acquired.refusal or "management has no nodes for this job")
        nodes = acquired.nodes if attaches else sorted(acquired.nodes, key=lambda node: roles.member_index(node.member))
        topology = self._topology = Topology.build(nodes, request.num_workers_per_csx)
        if attaches:
            self._attach(topology.members())
        logger.info("%s has its nodes: %s", self._job, ", ".join(member.name for member in topology.members()))

    def _attach(self, members: Sequence[Member]) -> None:
        """Opens the streams and waits for all answers. Raises TimeoutError, NodesDied."""
        deadline = time.monotonic() + deadlines.ATTACHMENT.attach
        with self._changed:
            if self._closing:
                return
            for member in members:
                attach = node_pb2.AttachJob(
                    job=self._job, node=member.name, index=member.index, lane=self._request.lane
                )
                self._attachments[member.name] = Attachment(
                    member, attach, self._responded, self._on_lost, self._on_defect
                )
            while len(self._endpoints) < len(self._attachments) and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0:
                    silent = sorted(self._attachments.keys() - self._endpoints.keys())
                    raise TimeoutError(f"{', '.join(silent)} did not answer within {deadlines.ATTACHMENT.attach:g} s")
                if self._interrupted:
                    raise NodesDied
                self._changed.wait(left)

    def give_up(self, member: Member) -> None:
        """Marks a node as dead, so that no wait includes it."""
        with self._changed:
            if self.has(member):
                self._attachments[member.name].is_given_up = True
        self.interrupt()

    def answers(self, member: Member) -> bool:
        """Whether this node is still the member, and is not given up."""
        return self.has(member) and not self._attachments[member.name].is_given_up

    def interrupt(self) -> None:
        """Makes replace, which may be waiting for a dead node, raise NodesDied."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def replace(
        self, dead: Sequence[Member], replace: Callable[[Sequence[management_pb2.NodeInfo]], management_pb2.Acquired]
    ) -> None:
        """Attaches to replacements of dead members. Raises NodesDied, TimeoutError, and as the callback.

        replace: gets replacements for these nodes; returns all nodes of the job.
        """
        with self._changed:
            self._interrupted = False
            lost = [member for member in dead if self.has(member) or self._is_unattached(member)]
            attachments = [self._attachments.pop(member.name) for member in lost if self.has(member)]
            for attachment in attachments:
                self._endpoints.pop(attachment.member.name, None)
        for attachment in attachments:
            attachment.close(0.0)
        if lost:
            acquired = replace([member.node for member in lost])
            self._topology = self.topology.with_nodes(acquired.nodes)
        self._attach([member for member in self.topology.members() if member.name not in self._attachments])

    def reduce(
        self,
        num_wafers: int,
        dead: Collection[str],
        reduce: Callable[[Sequence[management_pb2.NodeInfo]], management_pb2.Acquired],
    ) -> None:
        """Reduces the job to fewer wafers; living members take vacant indices. Raises as replace, and as the callback.

        reduce: has management reduce the job to these nodes; returns them.
        """
        topology = self.topology.reduced(num_wafers, dead)
        with self._changed:
            self._interrupted = False
            stays = {member.name: member for member in topology.members()}
            left = [each for name, each in self._attachments.items() if stays.get(name) is not each.member]
            for attachment in left:
                del self._attachments[attachment.member.name]
                self._endpoints.pop(attachment.member.name, None)
        for attachment in left:
            attachment.close(0.0)
        acquired = reduce([member.node for member in topology.members()])
        self._topology = topology.with_nodes(acquired.nodes)
        self._attach([member for member in self.topology.members() if member.name not in self._attachments])

    def _is_unattached(self, member: Member) -> bool:
        """Whether this node is the member, and was never attached to."""
        there = self.topology.members()
        return member.name not in self._attachments and any(each is member for each in there)

    def has(self, member: Member) -> bool:
        """Whether this node is the attached member, and not one that was replaced."""
        attachment = self._attachments.get(member.name)
        return attachment is not None and attachment.member is member

    def live_members(self) -> Sequence[Member]:
        """Returns all attached members."""
        with self._changed:
            return [attachment.member for attachment in self._attachments.values()]

    def send(self, members: Iterable[Member], make: Callable[[Member], node_pb2.AttachRequest]) -> None:
        """Sends a command to each of these that is attached."""
        for member, attachment in self._attached(members):
            attachment.send(make(member))

    def load(self, members: Iterable[Member], plan: plan_pb2.Plan, make: Callable[[Member], node_pb2.Load]) -> None:
        """Sends a Load and its part of the plan to each of these that is attached; make: the Load without the part."""
        for member, attachment in self._attached(members):
            attachment.load(make(member), plan)

    def _attached(self, members: Iterable[Member]) -> Iterator[tuple[Member, Attachment]]:
        """Yields those of these members that are attached."""
        for member in members:
            attachment = self._attachments.get(member.name)
            if attachment is not None:
                yield member, attachment

    def release_snapshot(self, step: int) -> None:
        """Releases the snapshot of this step, as the client no longer needs it."""
        command = node_pb2.AttachRequest(release_snapshot=node_pb2.ReleaseSnapshot(step=step))
        self.send(self.topology.state_keepers, lambda _: command)

    def state_shards(self) -> list[coordinator_pb2.StateShard]:
        """Returns the addresses of the job's states for the client."""
        return [
            coordinator_pb2.StateShard(
                shard=member.index, address=member.node.address, job=self._job, incarnation=self._incarnation
            )
            for member in self.topology.state_keepers
        ]

    def send_all(self, command: node_pb2.AttachRequest) -> int:
        """Sends a command to all members; returns their number."""
        members = self.topology.members()
        self.send(members, lambda _: command)
        return len(members)

    def links(self) -> dict[str, list[node_pb2.LinkSpec]]:
        """Returns the links of an execution, by the name of the node, including the coordinator's."""
        return self.topology.links({**self._endpoints, COORDINATOR: self._listener.endpoint()})

    def member_at(self, address: str) -> Member | None:
        """Returns the member that listens at an address."""
        with self._changed:
            members = [attachment.member for attachment in self._attachments.values()]
        return next((member for member in members if member.node.address == address), None)

    def describe(self, name: str) -> str:
        """Describes a member for the user: name, process and address."""
        with self._changed:
            attachment = self._attachments.get(name)
        if attachment is None:
            return name
        node = attachment.member.node
        return f"{name} (pid {node.process_id} at {node.address})"

    def close(self) -> list[str]:
        """Makes the nodes release the job; returns the names of those that are late (deadlines.ATTACHMENT.detach)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            attachments = dict(self._attachments)
        for attachment in attachments.values():
            attachment.end()
        deadline = time.monotonic() + deadlines.ATTACHMENT.detach
        return [
            name
            for name, attachment in attachments.items()
            if not attachment.close(max(0.0, deadline - time.monotonic()))
        ]

    def _responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        if response.WhichOneof("kind") != "attached":
            self._on_response(member, response)
            return
        with self._changed:
            if self.has(member):
                self._endpoints[member.name] = response.attached.endpoint
            self._changed.notify_all()

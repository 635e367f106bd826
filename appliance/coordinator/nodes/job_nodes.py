"""The nodes that work for the job: leased from management, attached to by a stream each, given commands, given back."""

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

# ----------------------------------------------------------------------------------------------------------------------
# The coordinator's stream to one node: commands go out, answers come in, and its end is the node's end


class Attachment:
    """Owns the stream and the thread that reads it."""

    def __init__(
        self,
        member: Member,
        attach: node_pb2.AttachJob,
        on_response: Callable[[Member, node_pb2.AttachResponse], None],
        on_lost: Callable[[Member, str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """The callbacks are called from that thread.

        on_lost(member, reason): the stream ended, and not by end(). on_defect(error): the thread did, by an exception
        that it did not expect.
        """
        self.member = member
        self.is_given_up = False  # it has died, or is taken for dead
        self._plan: plan_pb2.Plan | None = None  # whose part the node has
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
        """Queue a command. Never blocks."""
        self._commands.put(command)

    def load(self, load: node_pb2.Load, plan: plan_pb2.Plan) -> None:
        """Queue a Load of the node's part of a plan; the part goes with it unless it was that of the Load before."""
        load.same_plan = plan is self._plan
        if not load.same_plan:
            self._plan = plan
            _add_part(load, plan, self.member)
        self.send(node_pb2.AttachRequest(load=load))

    def end(self) -> None:
        """Close our side of the stream: the node drops the job, and then ends its own."""
        self._ending = True
        self._commands.put(None)

    def close(self, seconds: float) -> bool:
        """Wait until the node has dropped the job, but no longer than so; False if it had not."""
        self.end()
        self._thread.join(seconds)
        in_time = not self._thread.is_alive()
        self._channel.close()  # ends the stream, if it has not ended
        self._thread.join()
        return in_time

    def _read(self) -> None:
        reason = "it ended the connection"
        try:
            for response in self._call:
                self._on_response(self.member, response)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            # What gRPC says of a connection that broke helps nobody.
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


# --- The nodes that work for the job: leased from management, attached to, told what to do, given back ----------------


logger = logging.getLogger(__name__)


class NodesRefused(RuntimeError):
    """Management has no nodes for the job; the message says which are missing, and how to add them."""


class NodesDied(RuntimeError):
    """A node has died while others were attached to."""


class JobMembers:
    """All members of a job and the streams to them. acquire once, then replace, in any thread; commands from any."""

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
        """incarnation: of the job's coordinator. The callbacks are called from threads of the streams.

        on_lost(member, reason): a node's stream ended by itself. on_defect(error): its thread ended by an exception
        that it did not expect.
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
        """Whether the job has nodes: those that die can be replaced."""
        return self._topology is not None

    @property
    def topology(self) -> Topology:
        """Who is there; the nodes are leased."""
        assert self._topology is not None
        return self._topology

    def acquire(self, *, attaches: bool = True) -> None:
        """Lease the nodes and attach to all; blocks, until close is called at the latest.

        attaches: False leaves that to replace, where the job had the nodes before, and some may have died.

        Raises NodesRefused; what acquire raises; TimeoutError naming the nodes that do not answer; NodesDied, when
        others are to be attached to by replace.
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
        """Open the streams, until all have answered. Raises TimeoutError, NodesDied."""
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
        """A node has died: nobody waits for its answers any more."""
        with self._changed:
            if self.has(member):
                self._attachments[member.name].is_given_up = True
        self.interrupt()

    def answers(self, member: Member) -> bool:
        """Whether this node has its place, and can be waited for."""
        return self.has(member) and not self._attachments[member.name].is_given_up

    def interrupt(self) -> None:
        """A node has died: replace, which may wait for it to answer, raises NodesDied."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def replace(
        self, dead: Sequence[Member], replace: Callable[[Sequence[management_pb2.NodeInfo]], management_pb2.Acquired]
    ) -> None:
        """Attach to others in the places of those that have died. Raises NodesDied, TimeoutError; what replace raises.

        replace: gets other nodes for these; returns all of the job.
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
        """Go on with fewer wafers; others may take the places of the dead. Raises as replace; what reduce raises.

        reduce: has management give the job these nodes alone; returns them.
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
        """Whether this is the node that has its place, which was never attached to."""
        there = self.topology.members()
        return member.name not in self._attachments and any(each is member for each in there)

    def has(self, member: Member) -> bool:
        """Whether this is the node that has its place, and not one that did before."""
        attachment = self._attachments.get(member.name)
        return attachment is not None and attachment.member is member

    def live_members(self) -> Sequence[Member]:
        """All that are attached to."""
        with self._changed:
            return [attachment.member for attachment in self._attachments.values()]

    def send(self, members: Iterable[Member], make: Callable[[Member], node_pb2.AttachRequest]) -> None:
        """Give each its command; one that has died gets none."""
        for member, attachment in self._attached(members):
            attachment.send(make(member))

    def load(self, members: Iterable[Member], plan: plan_pb2.Plan, make: Callable[[Member], node_pb2.Load]) -> None:
        """Have each load its part of a plan; make: the Load without it. One that has died gets none."""
        for member, attachment in self._attached(members):
            attachment.load(make(member), plan)

    def _attached(self, members: Iterable[Member]) -> Iterator[tuple[Member, Attachment]]:
        """Those that are attached to."""
        for member in members:
            attachment = self._attachments.get(member.name)
            if attachment is not None:
                yield member, attachment

    def release_snapshot(self, step: int) -> None:
        """The client needs the snapshot of this step no more."""
        command = node_pb2.AttachRequest(release_snapshot=node_pb2.ReleaseSnapshot(step=step))
        self.send(self.topology.state_keepers, lambda _: command)

    def state_shards(self) -> list[coordinator_pb2.StateShard]:
        """Where the client reaches the states of the job."""
        return [
            coordinator_pb2.StateShard(
                shard=member.index, address=member.node.address, job=self._job, incarnation=self._incarnation
            )
            for member in self.topology.state_keepers
        ]

    def send_all(self, command: node_pb2.AttachRequest) -> int:
        """Give all members the same command; returns how many they are."""
        members = self.topology.members()
        self.send(members, lambda _: command)
        return len(members)

    def links(self) -> dict[str, list[node_pb2.LinkSpec]]:
        """Of one execution, by name; those of the coordinator too."""
        return self.topology.links({**self._endpoints, COORDINATOR: self._listener.endpoint()})

    def member_at(self, address: str) -> Member | None:
        """The member that listens at an address."""
        with self._changed:
            members = [attachment.member for attachment in self._attachments.values()]
        return next((member for member in members if member.node.address == address), None)

    def describe(self, name: str) -> str:
        """A member for the user: name, process and address."""
        with self._changed:
            attachment = self._attachments.get(name)
        if attachment is None:
            return name
        node = attachment.member.node
        return f"{name} (pid {node.process_id} at {node.address})"

    def close(self) -> list[str]:
        """Let the nodes drop the job; returns the names of those that had not after deadlines.ATTACHMENT.detach."""
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

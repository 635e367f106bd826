"""The nodes that work for the job: leases from management, a stream to each node, commands, release."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import grpc

from appliance.coordinator.nodes.topology import COORDINATOR, Member, Topology
from waferbox import deadlines, roles
from waferbox.host.event_loop import Changes, Mailbox
from waferbox.security.guard import bearer
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, node_pb2_grpc, plan_pb2

# --- The stream to one node -----------------------------------------------------------------------------------------

OpenChannel: TypeAlias = Callable[[str], grpc.aio.Channel]  # opens a channel to host:port


class Attachment:
    """The coordinator's stream to one node: commands out, responses in. Used in one event loop.

    The end of the stream is the node's end, as far as the job is concerned.
    """

    def __init__(
        self,
        member: Member,
        attach: node_pb2.AttachJob,
        open_channel: OpenChannel,
        on_response: Callable[[Member, node_pb2.AttachResponse], None],
        on_lost: Callable[[Member, str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """Opens the stream.

        Args:
            member: the node.
            attach: the first message.
            open_channel: opens a channel to an address.
            on_response: called with each response.
            on_lost: called with a reason when the stream ends without a call of end.
            on_defect: called with an unexpected exception that ended the stream.
        """
        self.member = member
        self.is_given_up = False  # dead, or considered dead
        self._plan: plan_pb2.Plan | None = None  # the plan whose part the node has
        self._on_response = on_response
        self._on_lost = on_lost
        self._on_defect = on_defect
        self._ending = False
        self._commands: Mailbox[node_pb2.AttachRequest] = Mailbox()
        self._commands.put(node_pb2.AttachRequest(attach=attach))
        self._channel = open_channel(member.node.address)
        self._call = node_pb2_grpc.NodeServiceStub(self._channel).Attach(
            self._commands.messages(), metadata=(bearer(member.node.lease),)
        )
        self._reading = asyncio.create_task(self._read(), name=f"attachment-{member.name}")
        self._reading.add_done_callback(self._ended)

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
        self._commands.close()

    async def close(self, seconds: float) -> bool:
        """Waits until the node has released the job; False if it has not after this many seconds."""
        self.end()
        if seconds > 0 and not self._reading.done():
            await asyncio.wait([self._reading], timeout=seconds)
        in_time = self._reading.done()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._channel.close(None)  # ends the stream if it is still open
        return in_time

    async def _read(self) -> None:
        reason = "it ended the connection"
        try:
            async for response in self._call:
                self._on_response(self.member, response)
        except grpc.aio.AioRpcError as error:
            # gRPC's own message about a broken connection is of no use to a user.
            lost = error.code() == grpc.StatusCode.UNAVAILABLE
            reason = "the connection to it broke" if lost else error.details() or error.code().name
        self._commands.close()
        if not self._ending:
            self._on_lost(self.member, reason)

    def _ended(self, reading: "asyncio.Task[None]") -> None:
        if not reading.cancelled() and isinstance(error := reading.exception(), Exception):
            self._on_defect(error)


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


class RecordedNodes(Protocol):
    """What the job's record has of its nodes; see JobRecord."""

    @property
    def former(self) -> Sequence[management_pb2.NodeInfo]: ...

    @property
    def hosts(self) -> Mapping[str, str]: ...

    def got_nodes(self, hosts: Mapping[str, str]) -> None: ...


class JobMembers:
    """All members of a job and the streams to them. Used in one event loop.

    acquire is called first, and after give_back; then replace and reduce; one at a time.
    """

    def __init__(
        self,
        job: str,
        request: management_pb2.CreateJobRequest,
        incarnation: int,
        record: RecordedNodes,
        acquire: Callable[[management_pb2.Acquire], Awaitable[management_pb2.Acquired]],
        open_channel: OpenChannel,
        on_response: Callable[[Member, node_pb2.AttachResponse], None],
        on_lost: Callable[[Member, str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """Makes the members without nodes; acquire gets these.

        Args:
            job: its name.
            request: of the client.
            incarnation: of the job's coordinator.
            record: of the job.
            acquire: requests nodes of management.
            open_channel: opens a channel to an address.
            on_response: called with each response.
            on_lost: called with a member and a reason when its stream ended by itself.
            on_defect: called with an unexpected exception that ended a stream.
        """
        self._job = job
        self._request = request
        self._incarnation = incarnation
        self._former = record.former
        self._record = record
        self._acquire = acquire
        self._open_channel = open_channel
        self._on_response = on_response
        self._on_lost = on_lost
        self._on_defect = on_defect
        self._changes = Changes()
        self._topology: Topology | None = None
        self._endpoints: dict[str, node_pb2.LinkEndpoint] = {}
        self._attachments: dict[str, Attachment] = {}
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

    async def acquire(self, *, attaches: bool = True) -> None:
        """Leases the nodes and attaches to all.

        Args:
            attaches: False leaves the attachment to replace: after a take-over some nodes may have died, and after a
                preemption they have no states.

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
            former=self._former,
            bound=self._bound(),
        )
        acquired = await self._acquire(wanted)
        if not acquired.nodes:
            raise NodesRefused(acquired.refusal or "management has no nodes for this job")
        nodes = acquired.nodes if attaches else sorted(acquired.nodes, key=lambda node: roles.member_index(node.member))
        self._former = ()
        self._record.got_nodes({node.member: node.host for node in nodes})
        topology = self._topology = Topology.build(nodes, request.num_workers_per_csx, self._record.hosts)
        if attaches:
            await self._attach(topology.members())
        logger.info("%s has its nodes: %s", self._job, ", ".join(member.name for member in topology.members()))

    def _bound(self) -> Sequence[str]:
        """Returns the members of a preempted job whose states are on the disks of their former hosts alone."""
        if not self._former:
            return ()
        keepers = Topology.build(self._former, self._request.num_workers_per_csx).state_keepers
        return [member.name for member in keepers]

    async def _attach(self, members: Sequence[Member]) -> None:
        """Opens the streams and waits for all answers. Raises TimeoutError, NodesDied."""
        for member in members:
            attach = node_pb2.AttachJob(job=self._job, node=member.name, index=member.index, lane=self._request.lane)
            self._attachments[member.name] = Attachment(
                member, attach, self._open_channel, self._responded, self._on_lost, self._on_defect
            )

        def answered() -> bool:
            if len(self._endpoints) == len(self._attachments):
                return True
            if self._interrupted:
                raise NodesDied
            return False

        if not await self._changes.until(answered, deadlines.ATTACHMENT.attach):
            silent = sorted(self._attachments.keys() - self._endpoints.keys())
            raise TimeoutError(f"{', '.join(silent)} did not answer within {deadlines.ATTACHMENT.attach:g} s")

    def give_up(self, member: Member) -> None:
        """Marks a node as dead, so that no wait includes it."""
        if self.has(member):
            self._attachments[member.name].is_given_up = True
        # A replacement may be waiting for the answer of this node.
        self._interrupted = True
        self._changes.notify()

    def answers(self, member: Member) -> bool:
        """Whether this node is still the member, and is not given up."""
        return self.has(member) and not self._attachments[member.name].is_given_up

    async def replace(
        self,
        dead: Sequence[Member],
        replace: Callable[[Sequence[management_pb2.NodeInfo]], Awaitable[management_pb2.Acquired]],
    ) -> None:
        """Attaches to replacements of dead members. Raises NodesDied, TimeoutError, and as the callback.

        replace: gets replacements for these nodes; returns all nodes of the job.
        """
        self._interrupted = False
        lost = [member for member in dead if self.has(member) or self._is_unattached(member)]
        await self._detach([self._attachments[member.name] for member in lost if self.has(member)])
        if lost:
            acquired = await replace([member.node for member in lost])
            self._topology = self.topology.with_nodes(acquired.nodes, self._attachments)
        await self._attach([member for member in self.topology.members() if member.name not in self._attachments])

    async def reduce(
        self,
        num_wafers: int,
        dead: Collection[str],
        reduce: Callable[[Sequence[management_pb2.NodeInfo]], Awaitable[management_pb2.Acquired]],
    ) -> None:
        """Reduces the job to fewer wafers; living members take vacant indices. Raises as replace, and as the callback.

        reduce: has management reduce the job to these nodes; returns them.
        """
        topology = self.topology.reduced(num_wafers, dead)
        self._interrupted = False
        stays = {member.name: member for member in topology.members()}
        await self._detach([each for name, each in self._attachments.items() if stays.get(name) is not each.member])
        acquired = await reduce([member.node for member in topology.members()])
        self._topology = topology.with_nodes(acquired.nodes, self._attachments)
        await self._attach([member for member in self.topology.members() if member.name not in self._attachments])

    async def _detach(self, attachments: Sequence[Attachment]) -> None:
        """Ends the streams to nodes that are no longer members, without waiting for these."""
        for attachment in attachments:
            del self._attachments[attachment.member.name]
            self._endpoints.pop(attachment.member.name, None)
        for attachment in attachments:
            await attachment.close(0.0)

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

    def links(self, own: node_pb2.LinkEndpoint) -> dict[str, list[node_pb2.LinkSpec]]:
        """Returns the links of an execution, by the name of the node. own: endpoint of the coordinator."""
        return self.topology.links({**self._endpoints, COORDINATOR: own})

    def member_at(self, address: str) -> Member | None:
        """Returns the member that listens at an address."""
        return next((member for member in self.live_members() if member.node.address == address), None)

    def describe(self, name: str) -> str:
        """Describes a member for the user: name, process and address."""
        attachment = self._attachments.get(name)
        if attachment is None:
            return name
        node = attachment.member.node
        return f"{name} (pid {node.process_id} at {node.address})"

    async def give_back(self) -> Sequence[management_pb2.NodeInfo]:
        """Makes the nodes release the job, which is preempted until acquire; returns the nodes."""
        late = await self.close()
        if late:
            logger.warning("%s did not release %s in time", ", ".join(late), self._job)
        self._attachments.clear()
        self._endpoints.clear()
        self._former = [member.node for member in self.topology.members()]
        return self._former

    async def close(self) -> list[str]:
        """Makes the nodes release the job; returns the names of those that are late (deadlines.ATTACHMENT.detach)."""
        attachments = dict(self._attachments)
        for attachment in attachments.values():
            attachment.end()
        in_time = await asyncio.gather(
            *(attachment.close(deadlines.ATTACHMENT.detach) for attachment in attachments.values())
        )
        return [name for name, was_in_time in zip(attachments, in_time, strict=True) if not was_in_time]

    def _responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        if response.WhichOneof("kind") != "attached":
            self._on_response(member, response)
            return
        if self.has(member):
            self._endpoints[member.name] = response.attached.endpoint
        self._changes.notify()

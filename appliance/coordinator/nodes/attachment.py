"""The coordinator's stream to one node: commands go out, answers come in, and its end is the node's end."""

import queue
from collections.abc import Callable

import grpc

from appliance.coordinator.nodes.topology import Member
from interconnect.rpc.server import make_channel
from interconnect.threads import GuardedThread
from wsc.v1 import node_pb2, node_pb2_grpc, plan_pb2


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

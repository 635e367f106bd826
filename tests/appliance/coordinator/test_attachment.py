"""What the coordinator sends to a node, seen from a node that only listens."""

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from appliance.coordinator.nodes.job_nodes import Attachment
from appliance.coordinator.nodes.topology import Member
from waferbox.rpc.async_server import make_async_channel
from wsc.v1 import management_pb2, node_pb2, node_pb2_grpc, plan_pb2

SECONDS = 20.0


class ListeningNode(node_pb2_grpc.NodeServiceServicer):
    """Answers nothing."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[node_pb2.AttachRequest] = queue.SimpleQueue()

    def Attach(
        self, request_iterator: Iterator[node_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[node_pb2.AttachResponse]:
        for request in request_iterator:
            self.commands.put(request)
        yield from ()


@pytest.fixture
def node() -> Iterator[tuple[ListeningNode, str]]:
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    listening = ListeningNode()
    node_pb2_grpc.add_NodeServiceServicer_to_server(listening, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield listening, f"127.0.0.1:{port}"
    server.stop(0).wait()


def plan(memory_bytes: int) -> plan_pb2.Plan:
    shards = [plan_pb2.MemoryXPlan(shard=shard) for shard in range(2)]
    return plan_pb2.Plan(wafer=plan_pb2.WaferPlan(memory_bytes=memory_bytes), memoryx=shards)


@pytest.mark.parametrize(("role", "part"), [(node_pb2.ROLE_WAFER, "wafer"), (node_pb2.ROLE_MEMORYX, "memoryx")])
def test_a_node_is_sent_a_plan_once(
    node: tuple[ListeningNode, str], role: "node_pb2.Role.ValueType", part: str
) -> None:
    listening, address = node
    info = management_pb2.NodeInfo(address=address, lease="0" * 32)
    member = Member(name="one-1", role=role, index=1, node=info)

    def fails(*arguments: object) -> None:
        raise AssertionError(arguments)

    async def load_plans() -> bool:
        attach = node_pb2.AttachJob(job="j", node=member.name)
        attachment = Attachment(member, attach, make_async_channel, fails, fails, fails)
        first, other = plan(1), plan(2)
        for epoch, each in enumerate([first, first, other, first]):
            attachment.load(node_pb2.Load(epoch=epoch), each)
        return await attachment.close(SECONDS)

    assert asyncio.run(load_plans())
    attach, *loads = (listening.commands.get(timeout=SECONDS) for _ in range(5))
    assert attach.WhichOneof("kind") == "attach"
    assert [load.load.epoch for load in loads] == [0, 1, 2, 3]
    assert [load.load.WhichOneof("plan") for load in loads] == [part, None, part, part]
    assert [load.load.same_plan for load in loads] == [False, True, False, False]
    if part == "wafer":
        assert [load.load.wafer.memory_bytes for load in loads] == [1, 0, 2, 1]
    else:
        assert loads[0].load.memoryx.shard == 1

"""A job that ends while a node still waits for links: the node is free at once, and says nothing more."""

import time

import pytest
from link_pairs import listening
from role_rig import AttachedNode, FakeManagement

from swarmx.swarmx_program import SwarmXJob
from waferbox import roles
from waferbox.host.threads import CancellationToken
from waferbox.runtime.node import Node, NodeSettings
from wsc.v1 import node_pb2

pytestmark = pytest.mark.services

SOON_SECONDS = 5.0  # far less than links are waited for


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("lane", [node_pb2.LANE_SHARED_MEMORY, node_pb2.LANE_GRPC])
def test_the_end_of_the_job_ends_the_wait_for_a_link(lane: "node_pb2.Lane.ValueType", *, dials: bool) -> None:
    management = FakeManagement()
    node = Node(roles.SWARMX, NodeSettings(management=management.address), SwarmXJob)
    node.start()
    try:
        with listening() as nobody:  # expects no link
            link = node_pb2.LinkSpec(token="secret", peer="wafer-0", endpoint=nobody.endpoint(), dial=dials)
            attached = AttachedNode(node.address, "swarmx-0", 0, lane)
            attached.send(load=node_pb2.Load(epoch=1, links=[link]))
            assert attached.says_nothing(0.2)
            begin = time.monotonic()
            attached.end()
            assert attached.says_no_more()
            assert time.monotonic() - begin < SOON_SECONDS
            attached.close()
            AttachedNode(node.address, "swarmx-0", 0, lane).close()  # it is free for the next
    finally:
        node.close()
        management.close()


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("lane", [node_pb2.LANE_SHARED_MEMORY, node_pb2.LANE_GRPC])
def test_a_stop_ends_the_load_that_waits_for_a_peer_which_has_died(
    lane: "node_pb2.Lane.ValueType", *, dials: bool
) -> None:
    management = FakeManagement()
    node = Node(roles.SWARMX, NodeSettings(management=management.address), SwarmXJob)
    node.start()
    try:
        with listening() as nobody:  # expects no link
            link = node_pb2.LinkSpec(token="secret", peer="wafer-0", endpoint=nobody.endpoint(), dial=dials)
            attached = AttachedNode(node.address, "swarmx-0", 0, lane)
            attached.send(load=node_pb2.Load(epoch=1, links=[link]))
            attached.send(stop=node_pb2.Stop(epoch=7))  # another: the load goes on
            assert attached.says_nothing(0.2)
            begin = time.monotonic()
            attached.send(stop=node_pb2.Stop(epoch=1))
            assert [attached.expect("stopped").stopped.epoch for _ in range(2)] == [7, 1]
            assert time.monotonic() - begin < SOON_SECONDS
            attached.end()
            assert attached.says_no_more()  # of the load neither
            attached.close()
    finally:
        node.close()
        management.close()


def test_waits_give_up_when_the_token_is_cancelled_and_when_they_come_later() -> None:
    token, told = CancellationToken(), []
    with token.on_cancel(lambda: told.append("first")):
        token.cancel()
        assert (told, token.cancelled) == (["first"], True)
    with token.on_cancel(lambda: told.append("later")):
        assert told == ["first", "later"]
    token.cancel()
    assert told == ["first", "later"]
